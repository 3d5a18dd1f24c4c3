// State of the generation loop on the device, and its step. Words of `loop`, I32 [32 + capacity]:
//   0 step        tokens made so far
//   1 status      0: running, 1: NaN among the logits, 2: an end-of-text token was made. Unless it is 0, nothing changes any more
//   8..13         temp F32, top_k, top_p F32, min_p F32, seed, n_eos
//   16..31        end-of-text ids
//   32..          ring buffer of the ids made: step s at 32 + s % capacity
//
//   bool loop_stopped()
//   void loop_advance(int id)    one thread calls, after every workgroup has called loop_stopped; id -1: NaN
//
// Needs LOOP_BIND, the binding of `loop` (tokens and pos follow it), and a push constant p.capacity.

const uint LOOP_STEP = 0u, LOOP_STATUS = 1u, LOOP_TEMP = 8u, LOOP_TOP_K = 9u, LOOP_TOP_P = 10u, LOOP_MIN_P = 11u, LOOP_SEED = 12u;
const uint LOOP_N_EOS = 13u, LOOP_EOS = 16u, LOOP_RING = 32u, MAX_EOS = 16u;
const int STATUS_NAN = 1, STATUS_EOS = 2;

layout(binding = LOOP_BIND) buffer Loop { int loop_words[]; };
layout(binding = LOOP_BIND + 1) writeonly buffer Tokens { int tokens[]; };
layout(binding = LOOP_BIND + 2) buffer Pos { int pos[]; };

bool loop_stopped() {
    return loop_words[LOOP_STATUS] != 0;
}

void loop_advance(int id) {
    if (id < 0) {
        loop_words[LOOP_STATUS] = STATUS_NAN;
        return;
    }
    const int step = loop_words[LOOP_STEP];
    tokens[0] = id;
    pos[0] += 1;
    loop_words[LOOP_RING + uint(step) % p.capacity] = id;
    loop_words[LOOP_STEP] = step + 1;
    const uint n_eos = min(uint(loop_words[LOOP_N_EOS]), MAX_EOS);
    for (uint i = 0; i < n_eos; i++)
        if (loop_words[LOOP_EOS + i] == id) loop_words[LOOP_STATUS] = STATUS_EOS;
}

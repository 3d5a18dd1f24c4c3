#version 450
// SAMPLE_DRAFTS, last step: drafts are accepted while they are what the columns before them picked; the generation loop advances by the
// tokens so made.
//
// Bindings:
//   0  picked  I32 [n]: what each column picked, -1 of NaN; of no meaning where pos is -1
//   1  loop    I32 [32 + capacity], see sample/loop.glsl
//   2  tokens  I32 [n]: the last token of the text, then drafts; word 0 becomes the new last token
//   3  pos     I32 [n]: positions, -1 where there is no draft; word 0 moves on
//   4  draft   I32, see vkback/ops/sampling/lookup.py: STEPS, DRAFTED, ACCEPTED, and both by place
//   5  seen    I32 [4 + vocab + n_ctx] (PENALIZED), see sample/penalties.comp: the tokens of all columns that counted are counted in
//
// Defines: PENALIZED 1 or nothing
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n, capacity, vocab, n_ctx;
} p;

layout(binding = 0) readonly buffer Picked { int picked[]; };
layout(binding = 1) buffer Loop { int loop_words[]; };
layout(binding = 2) buffer Tokens { int tokens[]; };
layout(binding = 3) buffer Pos { int pos[]; };
layout(binding = 4) buffer Draft { int draft[]; };
#ifdef PENALIZED
layout(binding = 5) buffer Seen { int seen[]; };
#endif

const uint MAX_COLUMNS = 32u, MAX_EOS = 16u;
const uint STEP = 0u, STATUS = 1u, LIMIT = 2u, N_EOS = 13u, EOS = 16u, RING = 32u;
const int NAN = 1, ENDED = 2, FULL = 3;
const uint STEPS = 8u, DRAFTED = 9u, ACCEPTED = 10u, DRAFTED_AT = 16u, ACCEPTED_AT = 48u;

shared int id[MAX_COLUMNS], token[MAX_COLUMNS], at[MAX_COLUMNS];
shared bool ends[MAX_COLUMNS];

#ifdef PENALIZED
// What sample/penalties.comp does for one token of the text.
void count_in(int t, int place) {
    const uint counts = 4u, places = 4u + p.vocab;
    const int last_n = seen[3], leaves = place - last_n;
    seen[counts + uint(t)] += 1;
    if (place < int(p.n_ctx)) seen[places + uint(place)] = t;
    if (leaves >= 0 && leaves < int(p.n_ctx)) seen[counts + uint(seen[places + uint(leaves)])] -= 1;
}
#endif

void main() {
    const uint tid = gl_LocalInvocationID.x;
    for (uint c = tid; c < p.n; c += WG_SIZE) {
        id[c] = picked[c];
        token[c] = tokens[c];
        at[c] = pos[c];
        const uint n_eos = min(uint(loop_words[N_EOS]), MAX_EOS);
        bool end = false;
        for (uint i = 0u; i < n_eos; i++) end = end || loop_words[EOS + i] == id[c];
        ends[c] = end;
    }
    barrier();
    if (tid != 0u || loop_words[STATUS] != 0 || at[0] < 0) return;
    int step = loop_words[STEP], status = 0;
    const int limit = loop_words[LIMIT];
    uint made = 0u, drafted = 0u;
    for (uint c = 1u; c < p.n; c++) drafted += at[c] >= 0 ? 1u : 0u;
    for (uint c = 0u; c < p.n && status == 0; c++) {
        if (c > 0u && (at[c] < 0 || token[c] != id[c - 1u])) break;
        if (id[c] < 0) {
            status = NAN;
            break;
        }
        loop_words[RING + uint(step) % p.capacity] = id[c];
        step++;
        made++;
        status = ends[c] ? ENDED : limit > 0 && step >= limit ? FULL : 0;
    }
    loop_words[STEP] = step;
    loop_words[STATUS] = status;
    if (made > 0u) {
        tokens[0] = id[made - 1u];
        pos[0] = at[0] + int(made);
    }
#ifdef PENALIZED
    for (uint c = 0u; c < made; c++) count_in(token[c], at[c]);
#endif
    const uint accepted = max(made, 1u) - 1u;
    draft[STEPS] += 1;
    draft[DRAFTED] += int(drafted);
    draft[ACCEPTED] += int(accepted);
    for (uint i = 0u; i < drafted; i++) draft[DRAFTED_AT + i] += 1;
    for (uint i = 0u; i < accepted; i++) draft[ACCEPTED_AT + i] += 1;
}

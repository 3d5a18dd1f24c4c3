#version 450
// PENALTIES: prepares logits for SAMPLE. Adds a bias per token, then penalizes tokens among the last `last_n` of the text;
// with MASKED, only tokens whose bit is set remain.
//
// Bindings:
//   0  logits  F32 [vocab]
//   1  bias    F32 [vocab]
//   2  seen    I32 [4 + vocab + n_ctx]: repetition, presence and frequency penalty F32, last_n; for each token, how often it is among the last
//              last_n before this step; the tokens by position. The step counts its own token in and the one that leaves the window out
//   3  loop    I32; word 1 is not 0 once the loop has stopped: then nothing is counted
//   4  tokens  I32 [1]: token of this step
//   5  pos     I32 [1]: its position
//   6  y       F32 [vocab]
//   7  mask    I32 [ceil(vocab / 32)] (MASKED): bit id % 32 of word id / 32; a token without its bit gets -inf
//
// One thread per token of the vocabulary; only that thread touches the token's count.
//
// Defines: WG_SIZE, and MASKED 1 or nothing
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab;
    uint n_ctx;
} p;

layout(std430, binding = 0) readonly buffer Logits { float logits[]; };
layout(std430, binding = 1) readonly buffer Bias { float bias[]; };
layout(std430, binding = 2) buffer Seen { int seen[]; };
layout(std430, binding = 3) readonly buffer Loop { int loop_words[]; };
layout(std430, binding = 4) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 5) readonly buffer Pos { int pos[]; };
layout(std430, binding = 6) writeonly buffer OutY { float y[]; };
#ifdef MASKED
layout(std430, binding = 7) readonly buffer Mask { uint mask[]; };
#endif

const uint COUNTS = 4u;

void main() {
    const uint id = gl_GlobalInvocationID.x;
    if (id >= p.vocab || loop_words[1] != 0) return;
    const uint places = COUNTS + p.vocab;
    const int token = tokens[0], at = pos[0], last_n = seen[3], leaves = at - last_n;
    int count = seen[COUNTS + id];
    // If last_n is 0, this step's token is itself the one that leaves;
    // its place is written below, perhaps by another thread, so it must not be read here.
    if (int(id) == token) count++;
    if (leaves >= 0 && leaves < int(p.n_ctx) && int(id) == (last_n == 0 ? token : seen[places + uint(leaves)])) count--;
    seen[COUNTS + id] = count;
    if (int(id) == token && at < int(p.n_ctx)) seen[places + uint(at)] = token;

    float x = logits[id] + bias[id];
    if (count > 0) {
        const float repeat = intBitsToFloat(seen[0]);
        x = x > 0.0 ? x / repeat : x * repeat;
        x -= intBitsToFloat(seen[1]) + intBitsToFloat(seen[2]) * float(count);
    }
#ifdef MASKED
    if ((mask[id >> 5] >> (id & 31u) & 1u) == 0u) x = uintBitsToFloat(0xff800000u);
#endif
    y[id] = x;
}

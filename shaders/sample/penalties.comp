#version 450
// PENALTIES: logits on their way to SAMPLE: a bias for each token, then penalties for those among the last `last_n` tokens of the text; with
// MASKED only tokens whose bit is set stay.
//
//   logits  F32 [vocab]
//   bias    F32 [vocab]
//   seen    I32 [4 + vocab + n_ctx]: repetition, presence and frequency penalty F32, last_n; how often each token stands among the last
//           last_n before this step; tokens by position. The step adds its own token and takes out the one that leaves
//   loop    I32; word 1 is not 0 once the loop has stopped: then nothing is counted
//   tokens  I32 [1], pos I32 [1]: the token of this step and its position
//   y       F32 [vocab]
//   mask    MASKED: I32 [ceil(vocab / 32)]: bit id % 32 of word id / 32; without it a token's y is -inf
//
// A thread takes one token of the vocabulary, and alone touches its count.
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
    // Of last_n 0 the token of this step is the one that leaves. Its place is written below by its own thread, which may be another one.
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

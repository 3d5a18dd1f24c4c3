#version 450
// DRAFT_P_MIN: drafts of a model end before the first token to which it gives less than a least probability.
//
// Bindings:
//   0  logits  F32 [vocab]: those that the loop's last token was picked from, of which it has the largest; with IDS its id is not its place
//   1  loop    I32 [32 + capacity], see sample/loop.glsl. Word 3: a token of this round was left out; its place in the ring, and those of all
//              that follow, become -1. A round begins with step 1
//
// One workgroup. The token's probability is 1 / sum(exp(logit - its own)).
//
// Defines: IDS 1 or nothing, those of common/reduce.glsl

#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab, capacity;
    float p_min;
} p;

layout(binding = 0) readonly buffer Logits { float logits[]; };
layout(binding = 1) buffer Loop { int loop_words[]; };

const uint STEP = 0u, STATUS = 1u, LEFT_OUT = 3u, RING = 32u;

void main() {
    const uint tid = gl_LocalInvocationID.x;
    const int step = loop_words[STEP];
    if (loop_words[STATUS] != 0 || step < 1) return;
    const uint last = RING + uint(step - 1) % p.capacity;
#ifdef IDS
    float largest = logits[tid < p.vocab ? tid : 0u];
    for (uint i = tid + WG_SIZE; i < p.vocab; i += WG_SIZE) largest = max(largest, logits[i]);
    const float own = wg_max(largest);
#else
    const float own = logits[uint(loop_words[last])];
#endif
    float sum = 0.0;
    for (uint i = tid; i < p.vocab; i += WG_SIZE) sum += exp(logits[i] - own);
    sum = wg_sum(sum);
    if (tid != 0u) return;
    const bool left_out = (step > 1 && loop_words[LEFT_OUT] != 0) || p.p_min * sum > 1.0;
    loop_words[LEFT_OUT] = left_out ? 1 : 0;
    if (left_out) loop_words[last] = -1;
}

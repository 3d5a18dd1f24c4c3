#version 450
// Attention of a sequence to itself, for training on CPU drivers: also stores the log-sum-exp of every row for the backward pass.
//
//   binding 0  q, binding 1  k, binding 2  v: attention/train/train_rules.glsl
//   binding 3  y F32 [tokens, n_head, VD]
//   binding 4  lse F32 [tokens, n_head]
//
// Workgroup (x, y, z) makes queries LANES x .. + LANES of head y of sequence z, one per lane.
// It walks the keys LANES at a time, with online softmax.
#include "attention/train/train_lanes.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutY { float y[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutLse { float lse[]; };

const float MASKED = -3.0e38;

void main() {
    const uint q0 = gl_WorkGroupID.x * LANES, row = q0 + t, head = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z;
    const uint kv_head = head / (p.n_head / p.n_head_kv);
    vec4 own[HD4], sums[VD4];
    LOAD_ROW(own, q, sequence, row, p.n_head, head, HD)
    [[unroll]] for (uint d = 0u; d < VD4; d++) sums[d] = vec4(0.0);
    float score_max = MASKED, weight_sum = 0.0;
    for (uint group = first_keys(q0); group <= last_keys(q0); group++) {
        const uint k0 = group * LANES;
        float s[LANES];
        {
            vec4 keys[HD4];
            LOAD_ROW(keys, k, sequence, k0 + t, p.n_head_kv, kv_head, HD)
            [[unroll]] for (uint i = 0u; i < LANES; i++) PRODUCT(s[i], own, keys, HD4, i)
        }
        float new_max = score_max;
        [[unroll]] for (uint i = 0u; i < LANES; i++) {
            s[i] = visible(row, k0 + i) ? score(s[i]) : MASKED;
            new_max = max(new_max, s[i]);
        }
        const float rescale = exp_bounded(score_max - new_max);
        score_max = new_max;
        weight_sum *= rescale;
        [[unroll]] for (uint d = 0u; d < VD4; d++) sums[d] *= rescale;
        vec4 values[VD4];
        LOAD_ROW(values, v, sequence, k0 + t, p.n_head_kv, kv_head, VD)
        [[unroll]] for (uint i = 0u; i < LANES; i++) {
            const float weight = s[i] == MASKED ? 0.0 : exp_bounded(s[i] - score_max);
            weight_sum += weight;
            ADD_ROW(sums, weight, values, VD4, i)
        }
    }
    if (row >= p.n) return;
    const uint at = (sequence * p.n + row) * p.n_head + head;
    lse[at] = score_max + log(weight_sum);
    [[unroll]] for (uint d = 0u; d < VD4; d++) sums[d] /= weight_sum;
    STORE_ROW(sums, y, at, VD)
}

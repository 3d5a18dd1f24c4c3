#version 450
// Attention of a sequence to itself, for training: also stores the log-sum-exp of every row for the backward pass.
//
//   binding 0  q, binding 1  k, binding 2  v: attention/train/train_rules.glsl
//   binding 3  y F32 [tokens, n_head, vd]
//   binding 4  lse F32 [tokens, n_head]
//
// Workgroup (x, y, z) makes queries 32 x .. + 32 of head y; z = sequence * parts + part of the columns of y.
// It walks the keys in tiles of 32 with online softmax.
//
// Defines: CHUNKS, tiles of 32 columns in a part
#include "attention/train/train_tiles.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutY { float y[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutLse { float lse[]; };

shared float score_max[32];
shared float weight_sums[32];
shared float rescales[32];

const float MASKED = -3.0e38;

void main() {
    const uint q0 = gl_WorkGroupID.x * 32u, head = gl_WorkGroupID.y;
    const uint sequence = gl_WorkGroupID.z / p.parts, column0 = gl_WorkGroupID.z % p.parts * 32u * CHUNKS;
    const uint kv_head = head / (p.n_head / p.n_head_kv);
    float sums[CHUNKS][4][4];
    [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) ZERO_TILE(sums[chunk])
    if (t < 32u) {
        score_max[t] = MASKED;
        weight_sums[t] = 0.0;
    }
    for (uint tile = first_keys(q0); tile <= last_keys(q0); tile++) {
        const uint k0 = tile * 32u;
        float s[4][4];
        ZERO_TILE(s)
        for (uint d0 = 0u; d0 < p.hd; d0 += 32u) {
            barrier();
            FILL_TILE(tile_a, VALUE_OF(q, sequence, q0 + r, p.n_head, head, p.hd, d0 + c))
            FILL_TILE(tile_b, VALUE_OF(k, sequence, k0 + r, p.n_head_kv, kv_head, p.hd, d0 + c))
            barrier();
            add_a_by_b_transposed(s);
        }
        to_scores(s);
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            [[unroll]] for (uint j = 0u; j < 4u; j++)
                weights[(4u * ty + i) * PITCH + 4u * tx + j] = mix(MASKED, s[i][j], visible(q0 + 4u * ty + i, k0 + 4u * tx + j));
        barrier();
        if (t < 32u) {
            float new_max = score_max[t];
            for (uint c = 0u; c < 32u; c++) new_max = max(new_max, weights[t * PITCH + c]);
            const float rescale = exp_bounded(score_max[t] - new_max);
            float weight_sum = weight_sums[t] * rescale;
            for (uint c = 0u; c < 32u; c++) {
                const float at = weights[t * PITCH + c];
                const float weight = at == MASKED ? 0.0 : exp_bounded(at - new_max);
                weights[t * PITCH + c] = weight;
                weight_sum += weight;
            }
            score_max[t] = new_max;
            weight_sums[t] = weight_sum;
            rescales[t] = rescale;
        }
        [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) {
            barrier();
            FILL_TILE(tile_b, VALUE_OF(v, sequence, k0 + r, p.n_head_kv, kv_head, p.vd, column0 + 32u * chunk + c))
            barrier();
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++) sums[chunk][i][j] *= rescales[4u * ty + i];
            add_weights_by_b(sums[chunk]);
        }
    }
    barrier();
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        const uint row = q0 + 4u * ty + i;
        if (row >= p.n) continue;
        const uint at = (sequence * p.n + row) * p.n_head + head;
        const float weight_sum = weight_sums[4u * ty + i];
        if (column0 == 0u && tx == 0u) lse[at] = score_max[4u * ty + i] + log(weight_sum);
        [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++)
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                const uint column = column0 + 32u * chunk + 4u * tx + j;
                if (column < p.vd) y[at * p.vd + column] = sums[chunk][i][j] / weight_sum;
            }
    }
}

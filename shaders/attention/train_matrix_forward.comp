#version 450
// Attention of texts to themselves, which keeps the log-sum-exp of every row for the backward pass, by cooperative matrices.
//
//   binding 0  q, binding 1  k, binding 2  v: F16, attention/train_matrix.glsl
//   binding 3  y F32 [texts, n, n_head, VD]
//   binding 4  lse F32 [texts, n, n_head]
//
// Scores are made twice: for the log-sum-exp, and then for the weights, so that no sum needs to be scaled on the way.
#include "attention/train_matrix.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InQ { uvec4 q[]; };
layout(std430, set = 0, binding = 0) readonly buffer InQFactors { float q_factors[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { uvec4 k[]; };
layout(std430, set = 0, binding = 1) readonly buffer InKFactors { float k_factors[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { uvec4 v[]; };
layout(std430, set = 0, binding = 2) readonly buffer InVFactors { float v_factors[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutY { float y[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutLse { float lse[]; };

const uint SHARE = SG / FM < 1 ? 1 : SG / FM;  // lanes that share a row
const float HIDDEN = -3.0e38;

shared float tops[WARPS * SG];
shared float totals[WARPS * SG];
shared float row_lse[WARPS * FM];

MATRIX_A own[NK];

MATRIX_SUM scores(uint tile, float factor) {
    MATRIX_SUM s = MATRIX_SUM(0.0);
    [[unroll]] for (uint d = 0; d < NK; d++) {
        MATRIX_B b;
        coopMatLoad(b, k, word_at(kv_head, p.n_head_kv, tile * FN, HD) + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutColumnMajor);
        s = coopMatMulAdd(own[d], b, s);
    }
    return s * factor;
}

void main() {
    find_places();
    if (first >= p.n) return;
    const uint lane = gl_SubgroupInvocationID, warp = gl_SubgroupID;
    const float factor = q_factors[factor_at(head, p.n_head, HD)] * k_factors[factor_at(kv_head, p.n_head_kv, HD)];
    [[unroll]] for (uint d = 0; d < NK; d++)
        coopMatLoad(own[d], q, word_at(head, p.n_head, first, HD) + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
    float top = HIDDEN, total = 0.0;
    for (uint tile = first_keys(); tile < end_keys(); tile++) {
        const uint stage = stage_sums(scores(tile, factor));
        for (uint i = lane; i < FM * SHARE; i += SG)
            for (uint c = i / FM; c < FN; c += SHARE) {
                if (!visible(first + i % FM, tile * FN + c)) continue;
                const float s = score(staged(stage, i % FM, c)), before = top;
                top = max(top, s);
                total = total * exp_bounded(before - top) + exp_bounded(s - top);
            }
        subgroup_sync();
    }
    tops[warp * SG + lane] = top;
    totals[warp * SG + lane] = total;
    subgroup_sync();
    for (uint r = lane; r < FM; r += SG) {
        float highest = HIDDEN, sum = 0.0;
        for (uint i = 0u; i < SHARE; i++) highest = max(highest, tops[warp * SG + i * FM + r]);
        for (uint i = 0u; i < SHARE; i++) sum += totals[warp * SG + i * FM + r] * exp_bounded(tops[warp * SG + i * FM + r] - highest);
        const float found = highest + log(sum);
        row_lse[warp * FM + r] = found;
        if (first + r < p.n) lse[(text * p.n + first + r) * p.n_head + head] = found;
    }
    subgroup_sync();
    MATRIX_SUM sums[NV];
    [[unroll]] for (uint d = 0; d < NV; d++) sums[d] = MATRIX_SUM(0.0);
    for (uint tile = first_keys(); tile < end_keys(); tile++) {
        const MATRIX_SUM s = scores(tile, factor);
        MATRIX_WEIGHT w;
        [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
            const uint at = uint(places[i]), r = at / FN, c = at % FN;
            w[i] = float16_t(visible(first + r, tile * FN + c) ? exp_bounded(score(s[i]) - row_lse[warp * FM + r]) : 0.0);
        }
        const MATRIX_A a = turned_weights(w);
        [[unroll]] for (uint d = 0; d < NV; d++) {
            MATRIX_B b;
            coopMatLoad(b, v, word_at(kv_head, p.n_head_kv, tile * FN, VD) + d * FN / 8, VD / 8, gl_CooperativeMatrixLayoutRowMajor);
            sums[d] = coopMatMulAdd(a, b, sums[d]);
        }
    }
    const float v_factor = v_factors[factor_at(kv_head, p.n_head_kv, VD)];
    [[unroll]] for (uint d = 0; d < NV; d++) STORE_SUMS(sums[d] * v_factor, y, VD, d * FN)
}

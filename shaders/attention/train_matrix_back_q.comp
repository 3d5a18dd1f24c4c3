#version 450
// Gradient of attention by the queries, dQ = dS K, by cooperative matrices.
//
//   bindings 0 to 5: attention/train_matrix_back.glsl
//   binding 6  dq F32 [texts, n, n_head, HD]
#include "attention/train_matrix.glsl"
#include "attention/train_matrix_back.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDq { float dq[]; };

void main() {
    find_places();
    if (first >= p.n) return;
    find_factors();
    MATRIX_A own_q[NK], own_dy[NV];
    [[unroll]] for (uint d = 0; d < NK; d++)
        coopMatLoad(own_q[d], q, word_at(head, p.n_head, first, HD) + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint d = 0; d < NV; d++)
        coopMatLoad(own_dy[d], dy, word_at(head, p.n_head, first, VD) + d * FK / 8, VD / 8, gl_CooperativeMatrixLayoutRowMajor);
    MATRIX_SUM sums[NK];
    [[unroll]] for (uint d = 0; d < NK; d++) sums[d] = MATRIX_SUM(0.0);
    for (uint tile = first_keys(); tile < end_keys(); tile++) {
        const uint k_at = word_at(kv_head, p.n_head_kv, tile * FN, HD), v_at = word_at(kv_head, p.n_head_kv, tile * FN, VD);
        MATRIX_SUM s = MATRIX_SUM(0.0), slopes = MATRIX_SUM(0.0);
        MATRIX_B b;
        [[unroll]] for (uint d = 0; d < NK; d++) {
            coopMatLoad(b, k, k_at + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutColumnMajor);
            s = coopMatMulAdd(own_q[d], b, s);
        }
        [[unroll]] for (uint d = 0; d < NV; d++) {
            coopMatLoad(b, v, v_at + d * FK / 8, VD / 8, gl_CooperativeMatrixLayoutColumnMajor);
            slopes = coopMatMulAdd(own_dy[d], b, slopes);
        }
        MATRIX_WEIGHT ds;
        [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
            const uint at = uint(places[i]);
            float slope = slopes[i], weight;
            weigh(first + at / FN, tile * FN + at % FN, s[i], slope, weight);
            ds[i] = float16_t(slope);
        }
        const MATRIX_A a = turned_weights(ds);
        [[unroll]] for (uint d = 0; d < NK; d++) {
            coopMatLoad(b, k, k_at + d * FN / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
            sums[d] = coopMatMulAdd(a, b, sums[d]);
        }
    }
    const float factor = p.scale * dy_factor * v_factor * k_factor;
    [[unroll]] for (uint d = 0; d < NK; d++) STORE_SUMS(sums[d] * factor, dq, HD, d * FN)
}

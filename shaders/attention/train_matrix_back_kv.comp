#version 450
// Gradients of attention by keys and values, dK = dS^T Q and dV = P^T dY, of each head of Q by itself, by cooperative matrices.
//
//   bindings 0 to 5: attention/train_matrix_back.glsl
//   binding 6  dk F32 [texts, n, n_head, HD]
//   binding 7  dv F32 [texts, n, n_head, VD]
#include "attention/train_matrix.glsl"
#include "attention/train_matrix_back.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDk { float dk[]; };
layout(std430, set = 0, binding = 7) writeonly buffer OutDv { float dv[]; };

void main() {
    find_places();
    if (first >= p.n) return;
    find_factors();
    const uint k_at = word_at(kv_head, p.n_head_kv, first, HD), v_at = word_at(kv_head, p.n_head_kv, first, VD);
    MATRIX_SUM of_k[NK], of_v[NV];
    [[unroll]] for (uint d = 0; d < NK; d++) of_k[d] = MATRIX_SUM(0.0);
    [[unroll]] for (uint d = 0; d < NV; d++) of_v[d] = MATRIX_SUM(0.0);
    for (uint tile = first_queries(); tile < end_queries(); tile++) {
        const uint q_at = word_at(head, p.n_head, tile * FN, HD), dy_at = word_at(head, p.n_head, tile * FN, VD);
        MATRIX_SUM s = MATRIX_SUM(0.0), slopes = MATRIX_SUM(0.0);
        MATRIX_A a;
        MATRIX_B b;
        [[unroll]] for (uint d = 0; d < NK; d++) {
            coopMatLoad(a, k, k_at + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
            coopMatLoad(b, q, q_at + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutColumnMajor);
            s = coopMatMulAdd(a, b, s);
        }
        [[unroll]] for (uint d = 0; d < NV; d++) {
            coopMatLoad(a, v, v_at + d * FK / 8, VD / 8, gl_CooperativeMatrixLayoutRowMajor);
            coopMatLoad(b, dy, dy_at + d * FK / 8, VD / 8, gl_CooperativeMatrixLayoutColumnMajor);
            slopes = coopMatMulAdd(a, b, slopes);
        }
        MATRIX_WEIGHT w, ds;
        [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
            const uint at = uint(places[i]);
            float slope = slopes[i], weight;
            weigh(tile * FN + at % FN, first + at / FN, s[i], slope, weight);
            w[i] = float16_t(weight);
            ds[i] = float16_t(slope);
        }
        a = turned_weights(w);
        [[unroll]] for (uint d = 0; d < NV; d++) {
            coopMatLoad(b, dy, dy_at + d * FN / 8, VD / 8, gl_CooperativeMatrixLayoutRowMajor);
            of_v[d] = coopMatMulAdd(a, b, of_v[d]);
        }
        a = turned_weights(ds);
        [[unroll]] for (uint d = 0; d < NK; d++) {
            coopMatLoad(b, q, q_at + d * FN / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
            of_k[d] = coopMatMulAdd(a, b, of_k[d]);
        }
    }
    const float factor = p.scale * dy_factor * v_factor * q_factor;
    [[unroll]] for (uint d = 0; d < NK; d++) STORE_SUMS(of_k[d] * factor, dk, HD, d * FN)
    [[unroll]] for (uint d = 0; d < NV; d++) STORE_SUMS(of_v[d] * dy_factor, dv, VD, d * FN)
}

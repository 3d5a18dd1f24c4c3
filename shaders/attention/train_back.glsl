// What both backward kernels of attention compute for a tile of 32 queries and 32 keys: the weights P = exp(score - lse), and the derivatives
// by the dot products q . k, dS = P (dy . v - delta) score'.
#include "attention/train_back_inputs.glsl"

void derivatives(uint text, uint head, uint q0, uint k0, out float weight[4][4], out float slope[4][4]) {
    const uint kv_head = head / (p.n_head / p.n_head_kv);
    ZERO_TILE(weight)
    ZERO_TILE(slope)
    for (uint d0 = 0u; d0 < p.hd; d0 += 32u) {
        barrier();
        FILL_TILE(left, VALUE_OF(q, text, q0 + r, p.n_head, head, p.hd, d0 + c))
        FILL_TILE(right, VALUE_OF(k, text, k0 + r, p.n_head_kv, kv_head, p.hd, d0 + c))
        barrier();
        add_rows_by_rows(weight);
    }
    for (uint d0 = 0u; d0 < p.vd; d0 += 32u) {
        barrier();
        FILL_TILE(left, VALUE_OF(dy, text, q0 + r, p.n_head, head, p.vd, d0 + c))
        FILL_TILE(right, VALUE_OF(v, text, k0 + r, p.n_head_kv, kv_head, p.vd, d0 + c))
        barrier();
        add_rows_by_rows(slope);
    }
    to_scores(weight);
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        const uint row = q0 + 4u * ty + i, at = (text * p.n + min(row, p.n - 1u)) * p.n_head + head;
        const float total = lse[at], common_part = delta[at];
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            const float s = weight[i][j];
            const float w = mix(0.0, exp_bounded(s - total), visible(row, k0 + 4u * tx + j));
            weight[i][j] = w;
            slope[i][j] = w * (slope[i][j] - common_part) * score_slope(s);
        }
    }
}

// Stores this thread's part of a tile in `weights`.
#define PUT_WEIGHTS(TILE)                                           \
    [[unroll]] for (uint i = 0u; i < 4u; i++)                       \
        [[unroll]] for (uint j = 0u; j < 4u; j++) weights[(4u * ty + i) * PITCH + 4u * tx + j] = TILE[i][j];

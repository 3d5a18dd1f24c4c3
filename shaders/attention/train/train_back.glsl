// What both backward kernels of attention compute for a tile of 32 queries and 32 keys: the weights P = exp(score - lse), and the derivatives
// by the dot products q . k, dS = P (dy . v - delta) score'.
#include "attention/train/train_back_inputs.glsl"

void derivatives(uint sequence, uint head, uint q0, uint k0, out float weight[4][4], out float score_grad[4][4]) {
    const uint kv_head = head / (p.n_head / p.n_head_kv);
    ZERO_TILE(weight)
    ZERO_TILE(score_grad)
    for (uint d0 = 0u; d0 < p.hd; d0 += 32u) {
        barrier();
        FILL_TILE(tile_a, VALUE_OF(q, sequence, q0 + r, p.n_head, head, p.hd, d0 + c))
        FILL_TILE(tile_b, VALUE_OF(k, sequence, k0 + r, p.n_head_kv, kv_head, p.hd, d0 + c))
        barrier();
        add_a_by_b_transposed(weight);
    }
    for (uint d0 = 0u; d0 < p.vd; d0 += 32u) {
        barrier();
        FILL_TILE(tile_a, VALUE_OF(dy, sequence, q0 + r, p.n_head, head, p.vd, d0 + c))
        FILL_TILE(tile_b, VALUE_OF(v, sequence, k0 + r, p.n_head_kv, kv_head, p.vd, d0 + c))
        barrier();
        add_a_by_b_transposed(score_grad);
    }
    to_scores(weight);
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        const uint row = q0 + 4u * ty + i, at = (sequence * p.n + min(row, p.n - 1u)) * p.n_head + head;
        const float row_lse = lse[at], row_delta = delta[at];
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            const float s = weight[i][j];
            const float w = mix(0.0, exp_bounded(s - row_lse), visible(row, k0 + 4u * tx + j));
            weight[i][j] = w;
            score_grad[i][j] = w * (score_grad[i][j] - row_delta) * score_derivative(s);
        }
    }
}

// Stores this thread's share of a tile in `weights`.
#define PUT_WEIGHTS(TILE)                                           \
    [[unroll]] for (uint i = 0u; i < 4u; i++)                       \
        [[unroll]] for (uint j = 0u; j < 4u; j++) weights[(4u * ty + i) * PITCH + 4u * tx + j] = TILE[i][j];

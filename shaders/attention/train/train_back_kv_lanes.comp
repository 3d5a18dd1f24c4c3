#version 450
// Gradients of attention with respect to keys and values, dK = dS^T Q, dV = P^T dY, for each head of Q. For CPU drivers.
// Those of the heads that share a kv head are added up by another kernel (sums/columns.comp).
//
//   bindings 0 to 5: attention/train/train_back_inputs.glsl
//   binding 6  dk F32 [tokens, n_head, HD]
//   binding 7  dv F32 [tokens, n_head, VD]
//
// Workgroup (x, y, z) makes keys LANES x .. + LANES, one per lane, for head y of sequence z.
// It walks the queries that see these keys, LANES at a time.
#include "attention/train/train_lanes.glsl"
#include "attention/train/train_back_lanes.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDk { float dk[]; };
layout(std430, set = 0, binding = 7) writeonly buffer OutDv { float dv[]; };

void main() {
    const uint k0 = gl_WorkGroupID.x * LANES, row = k0 + t, sequence = gl_WorkGroupID.z;
    const uint head = gl_WorkGroupID.y, kv_head = head / (p.n_head / p.n_head_kv);
    vec4 own[HD4], own_v[VD4], of_k[HD4], of_v[VD4];
    LOAD_ROW(own, k, sequence, row, p.n_head_kv, kv_head, HD)
    LOAD_ROW(own_v, v, sequence, row, p.n_head_kv, kv_head, VD)
    [[unroll]] for (uint d = 0u; d < HD4; d++) of_k[d] = vec4(0.0);
    [[unroll]] for (uint d = 0u; d < VD4; d++) of_v[d] = vec4(0.0);
    for (uint group = first_queries(k0); group <= last_queries(k0); group++) {
        const uint q0 = group * LANES, at = (sequence * p.n + min(q0 + t, p.n - 1u)) * p.n_head + head;
        const float row_lses = lse[at], row_deltas = delta[at];
        vec4 queries[HD4], slopes[VD4];
        LOAD_ROW(queries, q, sequence, q0 + t, p.n_head, head, HD)
        LOAD_ROW(slopes, dy, sequence, q0 + t, p.n_head, head, VD)
        [[unroll]] for (uint i = 0u; i < LANES; i++) {
            float product, dy_v, weight, score_grad;
            PRODUCT(product, own, queries, HD4, i)
            PRODUCT(dy_v, own_v, slopes, VD4, i)
            derivatives(
                product, dy_v, subgroupShuffle(row_lses, i), subgroupShuffle(row_deltas, i), visible(q0 + i, row), weight, score_grad);
            ADD_ROW(of_v, weight, slopes, VD4, i)
            ADD_ROW(of_k, score_grad, queries, HD4, i)
        }
    }
    if (row >= p.n) return;
    const uint at = (sequence * p.n + row) * p.n_head + head;
    STORE_ROW(of_k, dk, at, HD)
    STORE_ROW(of_v, dv, at, VD)
}

#version 450
// Gradient of attention with respect to the queries, dQ = dS K. For CPU drivers.
//
//   bindings 0 to 5: attention/train/train_back_inputs.glsl
//   binding 6  dq F32 [tokens, n_head, HD]
//
// Workgroup (x, y, z) makes queries LANES x .. + LANES of head y of sequence z, one per lane. It walks the keys that they see, LANES at a time.
#include "attention/train/train_lanes.glsl"
#include "attention/train/train_back_lanes.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDq { float dq[]; };

void main() {
    const uint q0 = gl_WorkGroupID.x * LANES, row = q0 + t, head = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z;
    const uint kv_head = head / (p.n_head / p.n_head_kv), at = (sequence * p.n + min(row, p.n - 1u)) * p.n_head + head;
    vec4 own[HD4], own_dy[VD4], sums[HD4];
    LOAD_ROW(own, q, sequence, row, p.n_head, head, HD)
    LOAD_ROW(own_dy, dy, sequence, row, p.n_head, head, VD)
    [[unroll]] for (uint d = 0u; d < HD4; d++) sums[d] = vec4(0.0);
    const float row_lse = lse[at], row_delta = delta[at];
    for (uint group = first_keys(q0); group <= last_keys(q0); group++) {
        const uint k0 = group * LANES;
        float dy_v[LANES];
        {
            vec4 values[VD4];
            LOAD_ROW(values, v, sequence, k0 + t, p.n_head_kv, kv_head, VD)
            [[unroll]] for (uint i = 0u; i < LANES; i++) PRODUCT(dy_v[i], own_dy, values, VD4, i)
        }
        vec4 keys[HD4];
        LOAD_ROW(keys, k, sequence, k0 + t, p.n_head_kv, kv_head, HD)
        [[unroll]] for (uint i = 0u; i < LANES; i++) {
            float product, weight, score_grad;
            PRODUCT(product, own, keys, HD4, i)
            derivatives(product, dy_v[i], row_lse, row_delta, visible(row, k0 + i), weight, score_grad);
            ADD_ROW(sums, score_grad, keys, HD4, i)
        }
    }
    if (row < p.n) STORE_ROW(sums, dq, at, HD)
}

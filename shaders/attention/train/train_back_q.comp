#version 450
// Gradient of attention with respect to the queries: dQ = dS K.
//
//   bindings 0 to 5: attention/train/train_back_inputs.glsl
//   binding 6  dq F32 [tokens, n_head, hd]
//
// Workgroup (x, y, z) makes queries 32 x .. + 32 of head y; z = sequence * parts + part of the columns of dq.
// It walks the keys that these queries see.
//
// Defines: CHUNKS, tiles of 32 columns in a part
#include "attention/train/train_tiles.glsl"
#include "attention/train/train_back.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDq { float dq[]; };

void main() {
    const uint q0 = gl_WorkGroupID.x * 32u, head = gl_WorkGroupID.y;
    const uint sequence = gl_WorkGroupID.z / p.parts, column0 = gl_WorkGroupID.z % p.parts * 32u * CHUNKS;
    const uint kv_head = head / (p.n_head / p.n_head_kv);
    float sums[CHUNKS][4][4];
    [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) ZERO_TILE(sums[chunk])
    for (uint tile = first_keys(q0); tile <= last_keys(q0); tile++) {
        const uint k0 = tile * 32u;
        float weight[4][4], score_grad[4][4];
        derivatives(sequence, head, q0, k0, weight, score_grad);
        PUT_WEIGHTS(score_grad)
        [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) {
            barrier();
            FILL_TILE(tile_b, VALUE_OF(k, sequence, k0 + r, p.n_head_kv, kv_head, p.hd, column0 + 32u * chunk + c))
            barrier();
            add_weights_by_b(sums[chunk]);
        }
    }
    [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++)
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                const uint row = q0 + 4u * ty + i, column = column0 + 32u * chunk + 4u * tx + j;
                if (row < p.n && column < p.hd) dq[((sequence * p.n + row) * p.n_head + head) * p.hd + column] = sums[chunk][i][j];
            }
}

#version 450
// Gradients of attention with respect to keys and values: dK = dS^T Q, dV = P^T dY, for each head of Q;
// those of the heads that share a kv head are added up by another kernel (sums/columns.comp).
//
//   bindings 0 to 5: attention/train/train_back_inputs.glsl
//   binding 6  dk F32 [tokens, n_head, hd]
//   binding 7  dv F32 [tokens, n_head, vd]
//
// Workgroup (x, y, z) makes keys 32 x .. + 32 for head y; z = sequence * parts + part of the columns.
// It walks the queries that see these keys.
//
// Defines: CHUNKS, tiles of 32 columns in a part
#include "attention/train/train_tiles.glsl"
#include "attention/train/train_back.glsl"

layout(std430, set = 0, binding = 6) writeonly buffer OutDk { float dk[]; };
layout(std430, set = 0, binding = 7) writeonly buffer OutDv { float dv[]; };

void main() {
    const uint k0 = gl_WorkGroupID.x * 32u, head = gl_WorkGroupID.y;
    const uint sequence = gl_WorkGroupID.z / p.parts, column0 = gl_WorkGroupID.z % p.parts * 32u * CHUNKS;
    float of_k[CHUNKS][4][4], of_v[CHUNKS][4][4];
    [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) {
        ZERO_TILE(of_k[chunk])
        ZERO_TILE(of_v[chunk])
    }
    for (uint tile = first_queries(k0); tile <= last_queries(k0); tile++) {
        const uint q0 = tile * 32u;
        float weight[4][4], score_grad[4][4];
        derivatives(sequence, head, q0, k0, weight, score_grad);
        PUT_WEIGHTS(weight)
        [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) {
            barrier();
            FILL_TILE(tile_b, VALUE_OF(dy, sequence, q0 + r, p.n_head, head, p.vd, column0 + 32u * chunk + c))
            barrier();
            add_weights_transposed_by_b(of_v[chunk]);
        }
        barrier();
        PUT_WEIGHTS(score_grad)
        [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++) {
            barrier();
            FILL_TILE(tile_b, VALUE_OF(q, sequence, q0 + r, p.n_head, head, p.hd, column0 + 32u * chunk + c))
            barrier();
            add_weights_transposed_by_b(of_k[chunk]);
        }
    }
    [[unroll]] for (uint chunk = 0u; chunk < CHUNKS; chunk++)
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                const uint row = k0 + 4u * ty + i, column = column0 + 32u * chunk + 4u * tx + j;
                const uint at = (sequence * p.n + row) * p.n_head + head;
                if (row < p.n && column < p.hd) dk[at * p.hd + column] = of_k[chunk][i][j];
                if (row < p.n && column < p.vd) dv[at * p.vd + column] = of_v[chunk][i][j];
            }
}

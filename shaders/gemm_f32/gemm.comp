#version 450
// Batched matrix product in f32, y = A B, where several batches may share a B: what gradients of a product need.
//
//   binding 0  B F32 [n3 / r3, n2 / r2, k, n]
//   binding 1  A, binding 2  y, threads and defines: gemm_f32/gemm.glsl
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
    uint m;
    uint n;
    uint k;
    uint splits;
    uint k_per_split;  // values of k per split, a multiple of DEPTH
    uint stride;   // from row to row of A (A_TRANSPOSED: from column to column)
    uint a_column0;  // column of A that belongs to row 0 of B: a weight may come in shards
    uint add;      // 1: add to y instead of overwriting it
    uint y_split0;  // where the first split goes in y
    uint n2;       // inner batches per outer one
    uint r2;       // neighbouring inner batches that share a B
    uint r3;       // neighbouring outer batches that share a B
} p;

layout(std430, set = 0, binding = 0) readonly buffer InB { float b[]; };

#define TILE_N (8 * TN)
#define PITCH_N (TILE_N + 4)
shared float b_tile[DEPTH * PITCH_N];

void load_b(uint k0, uint end, uint column, uint batch, uint t) {
    const uint b_base = (batch / p.n2 / p.r3 * (p.n2 / p.r2) + batch % p.n2 / p.r2) * p.k * p.n;
    [[unroll]] for (uint e = 0u; e < TILE_N * DEPTH / 64u; e++) {
        const uint i = e * 64u + t, k = i / TILE_N, at = i % TILE_N;
        b_tile[k * PITCH_N + at] = k0 + k < end && column + at < p.n ? b[b_base + (k0 + k) * p.n + column + at] : 0.0;
    }
}

#include "gemm_f32/gemm.glsl"

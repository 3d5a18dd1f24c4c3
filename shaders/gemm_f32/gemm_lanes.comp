#version 450
// Batched matrix product in f32, y = A B, where several batches may share a B. For CPU drivers.
//
//   binding 0  B F32 [n3 / r3, n2 / r2, k, n]
//   binding 1  A, binding 2  y, threads and defines: gemm_f32/gemm_lanes.glsl
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(local_size_x = LANES) in;

layout(push_constant) uniform Push {
    uint m;
    uint n;
    uint k;
    uint stride;   // from row to row of A (A_TRANSPOSED: from column to column)
    uint a_column0;  // column of A that belongs to row 0 of B: a weight may come in shards
    uint add;      // 1: add to y instead of overwriting it
    uint n2;       // inner batches per outer one
    uint r2;       // neighbouring inner batches that share a B
    uint r3;       // neighbouring outer batches that share a B
} p;

layout(std430, set = 0, binding = 0) readonly buffer InB { float b[]; };

void load_b(uint k, uint end, uint column, uint batch, out vec4 v[8]) {
    const uint from = ((batch / p.n2 / p.r3 * (p.n2 / p.r2) + batch % p.n2 / p.r2) * p.k + k) * p.n + column;
    [[unroll]] for (uint j = 0u; j < 8u; j++)
        [[unroll]] for (uint c = 0u; c < 4u; c++) v[j][c] = k < end && column + 4u * j + c < p.n ? b[from + 4u * j + c] : 0.0;
}

#include "gemm_f32/gemm_lanes.glsl"

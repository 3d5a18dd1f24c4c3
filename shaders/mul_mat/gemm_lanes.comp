#version 450
// y = A B in f32, matrices in batches, of which several may share a B, for CPU drivers.
//
//   binding 0  B F32 [n3 / r3, n2 / r2, k, n]
//   binding 1  A, binding 2  y, threads and defines: mul_mat/gemm_lanes.glsl
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(local_size_x = LANES) in;

layout(push_constant) uniform Push {
    uint m;
    uint n;
    uint k;
    uint stride;   // from row to row of A (A_TURNED: from column to column)
    uint first;    // of A's columns, which B's rows belong to: a weight may come in shards
    uint add;      // 1: y keeps what it has, and the sums are added to it
    uint n2;       // batches of an outer one
    uint r2;       // neighbouring batches that share a matrix B
    uint r3;       // and outer ones
} p;

layout(std430, set = 0, binding = 0) readonly buffer InB { float b[]; };

void load_b(uint k, uint end, uint column, uint batch, out vec4 v[8]) {
    const uint from = ((batch / p.n2 / p.r3 * (p.n2 / p.r2) + batch % p.n2 / p.r2) * p.k + k) * p.n + column;
    [[unroll]] for (uint j = 0u; j < 8u; j++)
        [[unroll]] for (uint c = 0u; c < 4u; c++) v[j][c] = k < end && column + 4u * j + c < p.n ? b[from + 4u * j + c] : 0.0;
}

#include "mul_mat/gemm_lanes.glsl"

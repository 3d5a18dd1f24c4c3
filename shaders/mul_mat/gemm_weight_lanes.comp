#version 450
// y = A W in f32 with a stored weight of any type, for CPU drivers: dX = dY W.
//
//   binding 0  W, k rows of n values, in the planes of docs/architecture.md
//   binding 1  A, binding 2  y, threads and defines: mul_mat/gemm_lanes.glsl
//
// Defines: QUANT_FILE
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "quant/weights.glsl"

layout(local_size_x = LANES) in;

layout(push_constant) uniform Push {
    Weights w;
    uint m;
    uint n;
    uint k;
    uint stride;   // from row to row of A (A_TURNED: from column to column)
    uint first;    // of A's columns, which B's rows belong to: a weight may come in shards
    uint add;      // 1: y keeps what it has, and the sums are added to it
} p;
#include "quant/place.glsl"
#include QUANT_FILE

// Past the end the last row: what it is multiplied by is 0.
void load_b(uint k, uint end, uint column, uint batch, out vec4 v[8]) {
    unit_decode(unit_load(place(min(k, end - 1u), column / 32u)), v);
}

#include "mul_mat/gemm_lanes.glsl"

#version 450
// y = A W in f32, with a stored weight of any type: dX = dY W. For CPU drivers.
//
//   binding 0  W, k rows of n values, planes (quant/weights.glsl)
//   binding 1  A, binding 2  y, threads and defines: gemm_f32/gemm_lanes.glsl
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
    uint stride;   // from row to row of A (A_TRANSPOSED: from column to column)
    uint a_column0;  // column of A that belongs to row 0 of W: a weight may come in shards
    uint add;      // 1: add to y instead of overwriting it
} p;
#include "quant/place.glsl"
#include QUANT_FILE

// Past the end it loads the last row, which is then multiplied by 0.
void load_b(uint k, uint end, uint column, uint batch, out vec4 v[8]) {
    unit_decode(unit_load(place(min(k, end - 1u), column / 32u)), v);
}

#include "gemm_f32/gemm_lanes.glsl"

#version 450
// Gradient of y = softmax(scale x) with respect to x, row by row: dx = scale y (dy - sum of dy y).
//
//   binding 0  dy F32 [rows, dim]
//   binding 1  y F32 [rows, dim]
//   binding 2  dx F32 [rows, dim]; may be dy or y
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InY { float y[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutDx { float dx[]; };

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x, from = row * p.dim;
    float sum = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) sum += dy[from + i] * y[from + i];
    sum = wg_sum(sum);
    for (uint i = t; i < p.dim; i += WG_SIZE) dx[from + i] = p.scale * y[from + i] * (dy[from + i] - sum);
}

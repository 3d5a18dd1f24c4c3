#version 450
// Mean of each row (0 for RMS_NORM) and 1 / sqrt(mean square about it + eps): what the gradient of a norm's weight needs of x.
//
//   binding 0  x F32 [rows, dim]
//   binding 1  y F32 [rows, 2]: mean, scale
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
//
// Defines: CENTER 1: NORM; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { vec2 y[]; };

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x, from = row * p.dim;
    float mean = 0.0;
#if CENTER
    for (uint i = t; i < p.dim; i += WG_SIZE) mean += x[from + i];
    mean = wg_sum(mean) / float(p.dim);
#endif
    float squares = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) squares += (x[from + i] - mean) * (x[from + i] - mean);
    squares = wg_sum(squares);
    if (t == 0u) y[row] = vec2(mean, 1.0 / sqrt(squares / float(p.dim) + p.eps));
}

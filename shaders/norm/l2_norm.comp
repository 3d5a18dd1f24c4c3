#version 450
// L2_NORM of rows: y = x / max(sqrt(sum of x^2), eps).
//
//   binding 0  x F32 [rows, dim]
//   binding 1  y F32 [rows, dim]
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += WG_SIZE) squares += x[row * p.dim + i] * x[row * p.dim + i];
    const float scale = 1.0 / max(sqrt(wg_sum(squares)), p.eps);
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += WG_SIZE) y[row * p.dim + i] = x[row * p.dim + i] * scale;
}

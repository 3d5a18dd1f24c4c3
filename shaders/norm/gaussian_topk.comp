#version 450
// GAUSSIAN_TOPK of rows: y = max(x - (mean + scale * standard deviation), 0), which leaves the share of a normal distribution's values that
// lies above scale.
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
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint first = row * p.dim;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += WG_SIZE) sum += x[first + i];
    const float mean = wg_sum(sum) / float(p.dim);
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += WG_SIZE) squares += (x[first + i] - mean) * (x[first + i] - mean);
    const float cutoff = mean + p.scale * sqrt(wg_sum(squares) / float(p.dim));
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += WG_SIZE) y[first + i] = max(x[first + i] - cutoff, 0.0);
}

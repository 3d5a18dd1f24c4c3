#version 450
// Gradient of RMS_NORM and NORM with respect to their input, row by row. With r = 1 / sqrt(mean of x^2 + eps) (NORM:
// of (x - mean)^2), n = r x (NORM: r (x - mean)) and g = dy w:
//   RMS_NORM  dx = r (g - n mean(g n))
//   NORM      dx = r (g - mean(g) - n mean(g n))
//
//   binding 0  dy F32 [rows, dim]
//   binding 1  x F32 [rows, dim]
//   binding 2  dx F32 [rows, dim]; may be dy or x
//   binding 3  w F32 [dim] (WEIGHT)
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
//
// Defines: CENTER 1: NORM; WEIGHT; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutDx { float dx[]; };
#if WEIGHT
layout(std430, set = 0, binding = 3) readonly buffer InW { float w[]; };
#define WEIGHT_OF(i) w[i]
#else
#define WEIGHT_OF(i) 1.0
#endif

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x, from = row * p.dim;
    const float inverse_dim = 1.0 / float(p.dim);
    float mean = 0.0;
#if CENTER
    for (uint i = t; i < p.dim; i += WG_SIZE) mean += x[from + i];
    mean = wg_sum(mean) * inverse_dim;
#endif
    float squares = 0.0, dot_sum = 0.0, grad_sum = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) {
        const float v = x[from + i] - mean, g = dy[from + i] * WEIGHT_OF(i);
        squares += v * v;
        dot_sum += g * v;
        grad_sum += g;
    }
    const float r = 1.0 / sqrt(wg_sum(squares) * inverse_dim + p.eps);
    const float projection = wg_sum(dot_sum) * inverse_dim * r * r;
#if CENTER
    const float mean_grad = wg_sum(grad_sum) * inverse_dim;
#else
    const float mean_grad = 0.0;
#endif
    for (uint i = t; i < p.dim; i += WG_SIZE)
        dx[from + i] = r * (dy[from + i] * WEIGHT_OF(i) - mean_grad - (x[from + i] - mean) * projection);
}

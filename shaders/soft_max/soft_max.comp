#version 450
// SOFT_MAX of rows, and SUM_ROWS.
//
//   SUM 0: y = exp(z - max z) / sum of exp(z - max z),  z = scale * x (+ mask)
//   SUM 1: y = sum of x
//
// Bindings in this order; those in brackets exist with the define:
//   x F32 [rows, dim]   [MASK: F32 [mask_rows, dim], row r uses mask row r % mask_rows; -inf hides a value]   y F32 [rows, dim], SUM: [rows]
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ... A row that is hidden altogether gives zeros.
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    uint mask_rows;
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
#if MASK
layout(std430, set = 0, binding = 1) readonly buffer InMask { float mask[]; };
#endif
layout(std430, set = 0, binding = 1 + MASK) buffer OutY { float y[]; };

// Below every value that a row may hold, and far from overflow: values at or below it count as hidden.
const float MASKED = -1e30;

float masked(uint row, uint i) {
    float z = p.scale * x[row * p.dim + i];
#if MASK
    z += mask[(row % p.mask_rows) * p.dim + i];
#endif
    return z < MASKED ? MASKED : z;  // max() may drop a NaN
}

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x;
#if SUM
    float part = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) part += x[row * p.dim + i];
    const float total = wg_sum(part);
    if (t == 0u) y[row] = total;
#else
    float largest = MASKED;
    for (uint i = t; i < p.dim; i += WG_SIZE) largest = max(largest, masked(row, i));
    largest = wg_max(largest);
    float part = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) {
        const float z = masked(row, i);
        const float e = z == MASKED ? 0.0 : exp(z - largest);
        y[row * p.dim + i] = e;
        part += e;
    }
    const float total = wg_sum(part);
    const float scale = total == 0.0 ? 0.0 : 1.0 / total;
    for (uint i = t; i < p.dim; i += WG_SIZE) y[row * p.dim + i] *= scale;
#endif
}

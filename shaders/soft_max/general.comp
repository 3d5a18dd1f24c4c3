#version 450
// Softmax of rows with a broadcast mask, slopes per head (ALiBi) and sinks. No model uses it outside of attention.
//
//   y = exp(z - top) / (sum of exp(z - top) + exp(sink - top)),  z = scale * x + slope of the head * mask,  top = the largest of z and sink
//
// Bindings in this order; those in brackets exist with the define:
//   x F32 [outer, heads, rows, dim]   [MASK: F32 [mask_outer, mask_heads, rows, dim], repeated along its first two axes;
//   -inf hides a value] [SINKS: F32 [heads]]   y F32, shape of x
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ... A row that is hidden altogether gives zeros.
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint outer;
    uint heads;
    uint rows;
    uint dim;
    uint mask_outer;
    uint mask_heads;
    uint heads_below;   // the largest power of two <= heads
    float scale;
    float slope_below;  // base of the slopes of the first heads_below heads; slope_above: of the others
    float slope_above;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
#if MASK
layout(std430, set = 0, binding = 1) readonly buffer InMask { float mask[]; };
#endif
#if SINKS
layout(std430, set = 0, binding = 1 + MASK) readonly buffer InSinks { float sinks[]; };
#endif
layout(std430, set = 0, binding = 1 + MASK + SINKS) buffer OutY { float y[]; };

// Below every value that a row may hold, and far from overflow: values at or below it count as hidden.
const float MASKED = -1e30;

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.outer * p.heads * p.rows) return;
    const uint head = row / p.rows % p.heads;
    const uint outer = row / p.rows / p.heads;
    const uint t = gl_LocalInvocationID.x;
    const uint mask_row = ((outer % p.mask_outer) * p.mask_heads + head % p.mask_heads) * p.rows + row % p.rows;
    const float slope = head < p.heads_below ? pow(p.slope_below, float(head + 1u)) : pow(p.slope_above, float(2u * (head - p.heads_below) + 1u));
    float largest = MASKED;
    for (uint i = t; i < p.dim; i += WG_SIZE) {
        float z = p.scale * x[row * p.dim + i];
#if MASK
        z += slope * mask[mask_row * p.dim + i];
#endif
        z = z < MASKED ? MASKED : z;  // max() may drop a NaN
        y[row * p.dim + i] = z;
        largest = max(largest, z);
    }
    largest = wg_max(largest);
#if SINKS
    largest = max(largest, sinks[head]);
#endif
    float part = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) {
        const float z = y[row * p.dim + i];
        const float e = z == MASKED ? 0.0 : exp(z - largest);
        y[row * p.dim + i] = e;
        part += e;
    }
    float total = wg_sum(part);
#if SINKS
    total += exp(sinks[head] - largest);
#endif
    const float scale = total == 0.0 ? 0.0 : 1.0 / total;
    for (uint i = t; i < p.dim; i += WG_SIZE) y[row * p.dim + i] *= scale;
}

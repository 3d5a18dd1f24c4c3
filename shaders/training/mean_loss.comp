#version 450
// Mean of the rows' losses over the rows whose target is a class; with LABELS over all rows. One workgroup;
// thread t has rows t, t + WG_SIZE, ...
//
//   binding 0  loss F32 [rows]
//   binding 1  targets I32 [rows]; not read with LABELS
//   binding 2  y F32 [1]; 0 if no row counts
//
// Defines: LABELS; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InLoss { float loss[]; };
layout(std430, set = 0, binding = 1) readonly buffer InTargets { int targets[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };

void main() {
    float sum = 0.0;
    uint count = 0u;
    for (uint i = gl_LocalInvocationID.x; i < p.rows; i += WG_SIZE) {
        sum += loss[i];
#if !LABELS
        count += uint(uint(targets[i]) < p.dim);
#endif
    }
    sum = wg_sum(sum);
#if LABELS
    count = p.rows;
#else
    count = wg_sum(count);
#endif
    if (gl_LocalInvocationID.x == 0u) y[0] = sum / float(max(count, 1u));
}

#version 450
// Sum of the squares of a tensor's values, in parts; with LAST, the sum of the parts.
//
//   binding 0  x F32 [elements]
//   binding 1  y F32: workgroup g writes value first + g
//
// Workgroup g takes values g * block .. + block; thread t every WG_SIZE-th of them.
//
// Defines: LAST; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint block;
    uint first;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint end = min((gl_WorkGroupID.x + 1u) * p.block, p.elements);
    float sum = 0.0;
    for (uint i = gl_WorkGroupID.x * p.block + gl_LocalInvocationID.x; i < end; i += WG_SIZE) {
#if LAST
        sum += x[i];
#else
        sum += x[i] * x[i];
#endif
    }
    sum = wg_sum(sum);
    if (gl_LocalInvocationID.x == 0u) y[p.first + gl_WorkGroupID.x] = sum;
}

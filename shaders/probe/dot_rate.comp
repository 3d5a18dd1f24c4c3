#version 450
// Measures the rate of arithmetic on registers, without matrices: packed integer dot products, or f32 multiply-adds.
//
//   binding 0  sink: written only if the result equals a value that never occurs, so that the compiler keeps the work
//
// Each thread has SUMS independent chains and takes STEPS steps along each, p.rounds times.
// A step depends on the chain's last result, so none can be optimized away.
//
// Defines:
//   WG       threads of a workgroup
//   INT_DOT  1: a step is a packed dot product of four bytes and an addition (8 operations); 0: an f32 fma (2 operations)
#extension GL_EXT_control_flow_attributes : require

#define SUMS 12
#define STEPS 8

layout(local_size_x = WG) in;
layout(std430, set = 0, binding = 0) writeonly buffer Sink { uint sink[]; };
layout(push_constant) uniform Push {
    uint rounds;
    uint factor;  // multiplier of a step: four bytes, or the bits of a float
    uint never;
} p;

#if INT_DOT
#include "common/int_dot.glsl"
#define SUM uint
#define STEP(sum) (uint(dot4(sum, p.factor)) + sum)
#define BITS(sum) (sum)
#else
#define SUM float
#define STEP(sum) fma(sum, uintBitsToFloat(p.factor), 0.5)
#define BITS(sum) floatBitsToUint(sum)
#endif

void main() {
    SUM sums[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) sums[i] = SUM(gl_GlobalInvocationID.x * SUMS + i);
    [[dont_unroll]] for (uint round = 0; round < p.rounds; round++)
        [[unroll]] for (uint step = 0; step < STEPS; step++)
            [[unroll]] for (uint i = 0; i < SUMS; i++) sums[i] = STEP(sums[i]);
    uint bits = 0u;
    [[unroll]] for (uint i = 0; i < SUMS; i++) bits ^= BITS(sums[i]);
    if (bits == p.never) sink[0] = bits;
}

#version 450
// y = H x / sqrt(k) for the Hadamard matrix H of k rows, k a power of two: H[i, j] is -1 if i & j has an odd number of ones, else 1.
//
//   binding 0  x F32 [rows, k]
//   binding 1  y F32 [rows, k]
//
// One pass of the fast Walsh-Hadamard transform: values whose positions differ only in the bits of stride * (RADIX - 1) are transformed among
// each other and multiplied by `scale`. log2(k) bits take several passes, each on the result of the one before. One thread per RADIX values.
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint threads;
    uint stride;
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.threads) return;
    const uint first = i / p.stride * p.stride * RADIX + i % p.stride;
    float values[RADIX];
    [[unroll]] for (uint j = 0u; j < RADIX; j++) values[j] = x[first + j * p.stride];
    [[unroll]] for (uint bit = 1u; bit < RADIX; bit *= 2u) {
        [[unroll]] for (uint j = 0u; j < RADIX; j++) {
            if ((j & bit) == 0u) {
                const float low = values[j], high = values[j | bit];
                values[j] = low + high;
                values[j | bit] = low - high;
            }
        }
    }
    [[unroll]] for (uint j = 0u; j < RADIX; j++) y[first + j * p.stride] = values[j] * p.scale;
}

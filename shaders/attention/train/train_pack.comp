#version 450
// Packs rows of heads as f16 for attention in training by cooperative matrices. Each head of each sequence is multiplied by a power of two of
// its own, so that its largest magnitude lies between 1 and 2.
//
//   binding 0  x F32 [sequences, n, heads, dim], dim a multiple of 4
//   binding 1  y F16 [sequences, heads, rows, dim], zeros from row n on; after it F32 [sequences, heads]: factors that undo the scaling
//   binding 2  the overflow word (gemm/overflow.glsl), raised only by infinities and NaN
//
// A workgroup takes a head of a sequence (heads along x, sequences along y). It finds the largest magnitude, then packs.
//
// Defines: WG_SIZE and those of common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;      // tokens of a sequence
    uint rows;   // n padded to whole matrices
    uint quads;  // of a row of a head; four values each
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { vec4 x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uvec2 y[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutFactors { float factors[]; };

#define OVERFLOW_BINDING 2
#include "gemm/overflow.glsl"

void main() {
    const uint heads = gl_NumWorkGroups.x, head = gl_WorkGroupID.y * heads + gl_WorkGroupID.x;
    const uint first = (gl_WorkGroupID.y * p.n * heads + gl_WorkGroupID.x) * p.quads, stride = heads * p.quads;
    uint magnitude = 0u;
    for (uint i = gl_LocalInvocationID.x; i < p.n * p.quads; i += WG_SIZE) {
        const uvec4 bits = floatBitsToUint(x[first + i / p.quads * stride + i % p.quads]) & 0x7fffffffu;
        magnitude = max(magnitude, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    const uint exponent = clamp(wg_max(magnitude) >> 23, 1u, 253u);
    const float power = uintBitsToFloat((254u - exponent) << 23);
    const uint all = heads * gl_NumWorkGroups.y * p.rows * p.quads;
    if (gl_LocalInvocationID.x == 0u) factors[2u * all + head] = uintBitsToFloat(exponent << 23);
    for (uint i = gl_LocalInvocationID.x; i < p.rows * p.quads; i += WG_SIZE) {
        const uint row = i / p.quads;
        const vec4 v = row < p.n ? track_overflow(power * x[first + row * stride + i % p.quads]) : vec4(0.0);
        y[head * p.rows * p.quads + i] = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
    }
    report_overflow();
}

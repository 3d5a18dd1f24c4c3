#version 450
// Converts values that were computed on the device to a weight of type F32 in the device layout, so that a product can take them.
//
//   binding 0  x F32, or F16 (two to a word) if FROM_F16 is 1: [size.x, size.y, size.z, size.w] with strides; the last axis is k
//   binding 1  y: eight parts of 16 bytes per unit of 32 values, rows padded with zeros to whole units
//
// One thread per 16 bytes of y.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uvec4 size;
    uvec4 stride;
    uint offset;
    uint units;  // units of a row
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { vec4 y[]; };

float value(uint at) {
#if FROM_F16
    return unpackHalf2x16(x[at >> 1] >> (16u * (at & 1u))).x;
#else
    return uintBitsToFloat(x[at]);
#endif
}

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint rows = p.size.x * p.size.y * p.size.z;
    const uint part = i / (rows * p.units);
    if (part >= 8u) return;
    const uint row = i / p.units % rows;
    const uint outer = row / p.size.z;
    const uint from = p.offset + (outer / p.size.y) * p.stride.x + (outer % p.size.y) * p.stride.y + (row % p.size.z) * p.stride.z;
    vec4 v;
    for (uint c = 0u; c < 4u; c++) {
        const uint column = 32u * (i % p.units) + 4u * part + c;
        v[c] = column < p.size.w ? value(from + column * p.stride.w) : 0.0;
    }
    y[i] = v;
}

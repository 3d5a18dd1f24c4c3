#version 450
// Copies a box of up to four axes between two strided places (strides in values, last axis last).
//
//   binding 0  x, 32-bit values, or F16 (two to a word) if FROM_F16 is 1. Value i of the box comes from
//              x_offset + sum of (i[a] % x_size[a]) * x_stride[a]; with FILL 1 it is 0 if any i[a] >= x_size[a]
//   binding 1  y, likewise F16 if TO_F16 is 1. Value i goes to y_offset + sum of i[a] * y_stride[a]
//
// One thread per value. With TO_F16 one per word: i[3] then counts pairs, the second value of a pair comes from x_next further on, and all of
// y's strides and its offset are even. F16 is converted to and from F32; otherwise 32 bits are copied as they are.
//
// With SYNC_SENTINEL values are F32, and every workgroup waits for some of x.
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uvec4 box;
    uvec4 x_size;
    uvec4 x_stride;
    uvec4 y_stride;
    uint x_offset;
    uint y_offset;
    uint x_next;
} p;

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InX { uint x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };

uint value(uint at) {
#if FROM_F16
    return floatBitsToUint(unpackHalf2x16(x[at >> 1] >> (16u * (at & 1u))).x);
#elif SYNC_SENTINEL
    uint word;
    SPIN_UNTIL(word = x[at], arrived(word))
    return floatBitsToUint(not_sentinel(uintBitsToFloat(word)));
#else
    return x[at];
#endif
}

void main() {
    const uint index = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint values = p.box.x * p.box.y * p.box.z * p.box.w;
    uint rest = min(index, values - 1u);
    uvec4 i;
    for (int axis = 3; axis >= 0; axis--) {
        i[axis] = rest % p.box[axis];
        rest /= p.box[axis];
    }
#if FILL
    const bool valid = all(lessThan(i, p.x_size));
#else
    const bool valid = true;
#endif
    const uvec4 steps = (i % p.x_size) * p.x_stride;
    const uint from = p.x_offset + steps.x + steps.y + steps.z + steps.w;
    const uvec4 along = i * p.y_stride;
    const uint to = p.y_offset + along.x + along.y + along.z + along.w;
#if TO_F16
    const uint word = packHalf2x16(vec2(uintBitsToFloat(value(from)), uintBitsToFloat(value(from + p.x_next))));
    if (index < values) y[to >> 1] = word;
#else
    const uint word = valid ? value(from) : 0u;
    if (index < values) y[to] = word;
#endif
    arrive();
}

#version 450
// Converts values of any plain type to any other, between strided places (strides in values, last axis last). Slow;
// for what the other kernels of this folder do not cover.
//
//   binding 0  x of type FROM_TYPE: value i comes from x_offset + sum of i[a] * x_stride[a]
//   binding 1  y of type TO_TYPE: value i goes to y_offset + sum of i[a] * y_stride[a] if SCATTER is 1, else it follows value i - 1
//
// Types: 0 F32, 1 F16, 2 BF16, 3 I32, 4 I16, 5 I8, 6 I64. Equal types are copied bit by bit; floats are truncated towards zero to integers.
// Without SCATTER one thread makes a word of y (both words of an I64). With SCATTER one thread makes a value; if that is smaller than a word,
// it changes its bits by atomics, since another thread may change the rest of the word at the same time.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uvec4 size;
    uvec4 x_stride;
    uvec4 y_stride;
    uint x_offset;
    uint y_offset;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
layout(std430, set = 0, binding = 1) buffer OutY { uint y[]; };

#define BITS(type) (type == 5 ? 8u : type == 1 || type == 2 || type == 4 ? 16u : 32u)
#define FROM_BITS BITS(FROM_TYPE)
#define TO_BITS BITS(TO_TYPE)
const uint per = 32u / TO_BITS;

uvec4 split_index(uint i) {
    uvec4 at;
    for (int axis = 3; axis >= 0; axis--) {
        at[axis] = i % p.size[axis];
        i /= p.size[axis];
    }
    return at;
}

// The bits of value `at` of x; of an I64, the upper word too.
uvec2 bits(uint at) {
#if FROM_TYPE == 6
    return uvec2(x[2u * at], x[2u * at + 1u]);
#else
    const uint each = 32u / FROM_BITS;
    return uvec2(bitfieldExtract(x[at / each], int(FROM_BITS * (at % each)), int(FROM_BITS)), 0u);
#endif
}

// The value as type TO_TYPE.
uvec2 convert(uvec2 b) {
#if FROM_TYPE == TO_TYPE
    return b;
#else
#if FROM_TYPE == 0
    const float f = uintBitsToFloat(b.x);
#elif FROM_TYPE == 1
    const float f = unpackHalf2x16(b.x).x;
#elif FROM_TYPE == 2
    const float f = uintBitsToFloat(b.x << 16u);
#endif
#if FROM_TYPE >= 3 && FROM_TYPE <= 5
    const int n = bitfieldExtract(int(b.x), 0, int(FROM_BITS));
    const uint above = n < 0 ? ~0u : 0u;
#elif FROM_TYPE == 6
    const int n = int(b.x);
    const uint above = b.y;
#else
    const int n = int(f);
    const uint above = n < 0 ? ~0u : 0u;
#endif
#if FROM_TYPE >= 3
    const float f = float(n);
#endif
#if TO_TYPE == 0
    return uvec2(floatBitsToUint(f), 0u);
#elif TO_TYPE == 1
    return uvec2(packHalf2x16(vec2(f, 0.0)), 0u);
#elif TO_TYPE == 2
    const uint u = floatBitsToUint(f);
    return uvec2(((u & 0x7FFFFFFFu) > 0x7F800000u ? u | 0x400000u : u + 0x7FFFu + ((u >> 16u) & 1u)) >> 16u, 0u);
#elif TO_TYPE == 6
    return uvec2(uint(n), above);
#else
    return uvec2(bitfieldExtract(uint(n), 0, int(TO_BITS)), 0u);
#endif
#endif
}

uvec2 value(uint i) {
    const uvec4 steps = split_index(i) * p.x_stride;
    return convert(bits(p.x_offset + steps.x + steps.y + steps.z + steps.w));
}

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint elements = p.size.x * p.size.y * p.size.z * p.size.w;
#if SCATTER
    if (i >= elements) return;
    const uvec4 steps = split_index(i) * p.y_stride;
    const uint to = p.y_offset + steps.x + steps.y + steps.z + steps.w;
    const uvec2 v = value(i);
#if TO_TYPE == 6
    y[2u * to] = v.x;
    y[2u * to + 1u] = v.y;
#elif TO_TYPE == 0 || TO_TYPE == 3
    y[to] = v.x;
#else
    const int first = int(TO_BITS * (to % per));
    atomicAnd(y[to / per], ~bitfieldInsert(0u, ~0u, first, int(TO_BITS)));
    atomicOr(y[to / per], bitfieldInsert(0u, v.x, first, int(TO_BITS)));
#endif
#else
#if TO_TYPE == 6
    if (i >= elements) return;
    const uvec2 v = value(i);
    y[2u * i] = v.x;
    y[2u * i + 1u] = v.y;
#else
    if (i >= (elements + per - 1u) / per) return;
    uint word = 0u;
    for (uint j = 0u; j < per; j++)
        if (per * i + j < elements) word = bitfieldInsert(word, value(per * i + j).x, int(TO_BITS * j), int(TO_BITS));
    y[i] = word;
#endif
#endif
}

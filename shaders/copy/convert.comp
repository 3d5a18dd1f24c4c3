#version 450
// Converts between F32 and F16 (two to a word).
//
//   binding 0  x F32, or F16 if FROM_F16 is 1
//   binding 1  y F32, or F16 if TO_F16 is 1
//
// One thread per two neighbouring values.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint pairs;
} p;

#if FROM_F16
layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
#define LOAD(i) unpackHalf2x16(x[i])
#else
layout(std430, set = 0, binding = 0) readonly buffer InX { vec2 x[]; };
#define LOAD(i) x[i]
#endif
#if TO_F16
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };
#define STORE(i, v) y[i] = packHalf2x16(v)
#else
layout(std430, set = 0, binding = 1) writeonly buffer OutY { vec2 y[]; };
#define STORE(i, v) y[i] = v
#endif

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i < p.pairs) { STORE(i, LOAD(i)); }
}

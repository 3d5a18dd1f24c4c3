#version 450
// PREVIOUS: the position before each of n positions; -1 before the first one, and where there is none (-1).
//
//   binding 0  pos       I32 [n]
//   binding 1  previous  I32 [n]
//
// One thread per position. It waits for nothing.
layout(local_size_x = WG_SIZE) in;

#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint n;
} p;

layout(std430, binding = 0) readonly buffer InPos { int pos[]; };
layout(std430, binding = 1) writeonly buffer Previous { int previous[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i < p.n) previous[i] = max(pos[i], 0) - 1;
    arrive();
}

#version 450
// Measures the read bandwidth of memory, the bound that kernels are compared with: reads a buffer once.
//
//   binding 0  source, a multiple of 16 * WG * UNROLL bytes
//   binding 1  sink: written only if the result equals a value that never occurs, so that the compiler keeps the reads
//
// Workgroups take turns at tiles of WG * UNROLL 16-byte words; the loads of a tile are independent.

layout(local_size_x = WG) in;
layout(std430, set = 0, binding = 0) readonly buffer Source { uvec4 source[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Sink { uint sink[]; };
layout(push_constant) uniform Push { uint tiles; uint never; } p;

void main() {
    uvec4 sum = uvec4(0);
    for (uint tile = gl_WorkGroupID.x; tile < p.tiles; tile += gl_NumWorkGroups.x) {
        const uint base = tile * WG * UNROLL + gl_LocalInvocationIndex;
        uvec4 v[UNROLL];
        for (uint i = 0; i < UNROLL; i++) v[i] = source[base + i * WG];
        for (uint i = 0; i < UNROLL; i++) sum ^= v[i];
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == p.never) sink[0] = sum.x;
}

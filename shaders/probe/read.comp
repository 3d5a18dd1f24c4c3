#version 450
// Reads a buffer once, as fast as the device can: what every kernel is measured against.
//   0  source, a multiple of 16 * WG * UNROLL bytes
//   1  sink: written only if the sum hits a value that never comes, so that the reads stay
// Each workgroup takes tiles of WG * UNROLL 16-byte words in turn; the loads of a tile are independent.

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

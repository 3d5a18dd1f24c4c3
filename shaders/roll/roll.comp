#version 450
// ROLL: y[i3, i2, i1, i0] = x[i3 - s3, i2 - s2, i1 - s1, i0 - s0], indices modulo the sizes.
//
//   binding 0  x F32 [n3, n2, n1, n0]
//   binding 1  y F32, shape of x
//
// One thread per value. Shifts are given as 0 <= s < n.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n3;
    uint n2;
    uint n1;
    uint n0;
    uint s3;
    uint s2;
    uint s1;
    uint s0;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint i0 = i % p.n0, i1 = i / p.n0 % p.n1, i2 = i / (p.n0 * p.n1) % p.n2, i3 = i / (p.n0 * p.n1 * p.n2);
    if (i3 >= p.n3) return;
    const uint row = (((i3 + p.n3 - p.s3) % p.n3 * p.n2 + (i2 + p.n2 - p.s2) % p.n2) * p.n1 + (i1 + p.n1 - p.s1) % p.n1) * p.n0;
    y[i] = x[row + (i0 + p.n0 - p.s0) % p.n0];
}

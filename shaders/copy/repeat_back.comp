#version 450
// Gradient of REPEAT: each value is the sum over its repetitions.
//
//   binding 0  dy F32 [n3 t3, n2 t2, n1 t1, n0 t0]
//   binding 1  dx F32 [n3, n2, n1, n0]
//
// One thread per value of dx; it adds in the order of dy.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint n0, n1, n2, n3;
    uint t0, t1, t2, t3;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutDx { float dx[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const uint i0 = i % p.n0, i1 = i / p.n0 % p.n1, i2 = i / (p.n0 * p.n1) % p.n2, i3 = i / (p.n0 * p.n1 * p.n2);
    const uint s1 = p.n0 * p.t0, s2 = s1 * p.n1 * p.t1, s3 = s2 * p.n2 * p.t2;
    float sum = 0.0;
    for (uint r3 = 0u; r3 < p.t3; r3++)
        for (uint r2 = 0u; r2 < p.t2; r2++)
            for (uint r1 = 0u; r1 < p.t1; r1++)
                for (uint r0 = 0u; r0 < p.t0; r0++)
                    sum += dy[(i3 + r3 * p.n3) * s3 + (i2 + r2 * p.n2) * s2 + (i1 + r1 * p.n1) * s1 + i0 + r0 * p.n0];
    dx[i] = sum;
}

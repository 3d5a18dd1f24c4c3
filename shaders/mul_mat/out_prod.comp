#version 450
// y[i, j] = sum over k of b[k, i] * a[k, j]: sums of outer products, in batches of which several of b share one of a.
//
//   binding 0  a F32 [n3 / r3, n2 / r2, k, m]
//   binding 1  b F32 [n3, n2, k, n]
//   binding 2  y F32 [n3, n2, n, m]
//
// A thread takes one value of y.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint m;
    uint n;
    uint k;
    uint n2;
    uint r2;
    uint r3;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 1) readonly buffer InB { float b[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const uint column = i % p.m, row = i / p.m % p.n, batch = i / (p.m * p.n);
    const uint shared_by = batch / p.n2 / p.r3 * (p.n2 / p.r2) + batch % p.n2 / p.r2;
    float sum = 0.0;
    for (uint k = 0u; k < p.k; k++) sum += a[(shared_by * p.k + k) * p.m + column] * b[(batch * p.k + k) * p.n + row];
    y[i] = sum;
}

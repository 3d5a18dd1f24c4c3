#version 450
// OUT_PROD with small k, where tiles would gain nothing: y[i, j] = sum over k of b[k, i] * a[k, j]. Batched;
// several batches of b may share one of a.
//
//   binding 0  a F32 [n3 / r3, n2 / r2, k, m]
//   binding 1  b F32 [n3, n2, k, n]
//   binding 2  y F32 [n3, n2, n, m]
//
// One thread per column of eight rows: columns along x, rows along y, batches along z.
//
// Defines: WG_SIZE
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint m;
    uint n;
    uint k;
    uint n2;
    uint r2;
    uint r3;
    uint add;    // 1: add to y instead of overwriting it
} p;

layout(std430, set = 0, binding = 0) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 1) readonly buffer InB { float b[]; };
layout(std430, set = 0, binding = 2) buffer OutY { float y[]; };

void main() {
    const uint column = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x, row = gl_WorkGroupID.y * 8u, batch = gl_WorkGroupID.z;
    if (column >= p.m) return;
    const uint a_base = (batch / p.n2 / p.r3 * (p.n2 / p.r2) + batch % p.n2 / p.r2) * p.k;
    float sums[8];
    [[unroll]] for (uint i = 0u; i < 8u; i++) sums[i] = 0.0;
    for (uint k = 0u; k < p.k; k++) {
        const float v = a[(a_base + k) * p.m + column];
        [[unroll]] for (uint i = 0u; i < 8u; i++) sums[i] = fma(v, b[(batch * p.k + k) * p.n + min(row + i, p.n - 1u)], sums[i]);
    }
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        const uint at = (batch * p.n + row + i) * p.m + column;
        if (row + i < p.n) y[at] = p.add != 0u ? y[at] + sums[i] : sums[i];
    }
}

#version 450
// SOLVE_TRI: X with L X = B for lower triangular L, by forward substitution.
//
//   binding 0  l F32 [batches, n, n]
//   binding 1  b F32 [batches, n, columns]
//   binding 2  x F32, shape of b; not write-only, since a thread reads back what it stored
//
// One thread per column of X.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint threads;    // batches * columns
    uint n;
    uint columns;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InL { float l[]; };
layout(std430, set = 0, binding = 1) readonly buffer InB { float b[]; };
layout(std430, set = 0, binding = 2) buffer OutX { float x[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.threads) return;
    const uint batch = i / p.columns, column = i % p.columns;
    const uint rows = batch * p.n * p.n, first = batch * p.n * p.columns + column;
    for (uint r = 0u; r < p.n; r++) {
        float rest = b[first + r * p.columns];
        for (uint c = 0u; c < r; c++) rest -= l[rows + r * p.n + c] * x[first + c * p.columns];
        x[first + r * p.columns] = rest / l[rows + r * p.n + r];
    }
}

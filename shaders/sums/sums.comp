#version 450
// Sums along rows, cumulative sums, and the count of equal values.
//
//   FUNCTION 0  y[row] = factor * sum of x[row]             y F32 [rows]
//   FUNCTION 1  y[row, i] = sum of x[row, 0..i]             y F32 [rows, k]
//   FUNCTION 2  y = number of values where a equals x       y: an I64, whose upper word is 0; x and a I32 [rows, k]
//
//   binding 0  x [rows, k]
//   binding 1  y
//   binding 2  a (FUNCTION 2)
//
// One workgroup per row (FUNCTION 2: one for everything); its threads share out the values.
#include "common/reduce.glsl"
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint k;
    float factor;
} p;

#if FUNCTION == 2
layout(std430, set = 0, binding = 0) readonly buffer InX { int x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };
layout(std430, set = 0, binding = 2) readonly buffer InA { int a[]; };
#else
layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };
#endif
#if FUNCTION == 1
shared float sums[WG_SIZE];
#endif

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint thread = gl_LocalInvocationID.x;
#if FUNCTION == 0
    float sum = 0.0;
    for (uint i = thread; i < p.k; i += WG_SIZE) sum += x[row * p.k + i];
    sum = wg_sum(sum);
    if (thread == 0u) y[row] = p.factor * sum;
#elif FUNCTION == 1
    // Each thread has a stretch of the row: first it sums the stretch, then it adds the sums of the stretches before it.
    const uint each = (p.k + WG_SIZE - 1u) / WG_SIZE;
    const uint first = min(thread * each, p.k), end = min(first + each, p.k);
    float sum = 0.0;
    for (uint i = first; i < end; i++) sum += x[row * p.k + i];
    sums[thread] = sum;
    barrier();
    sum = 0.0;
    for (uint t = 0u; t < thread; t++) sum += sums[t];
    for (uint i = first; i < end; i++) {
        sum += x[row * p.k + i];
        y[row * p.k + i] = sum;
    }
#else
    uint count = 0u;
    for (uint i = thread; i < p.k; i += WG_SIZE) count += x[i] == a[i] ? 1u : 0u;
    count = wg_sum(count);
    if (thread < 2u) y[thread] = thread == 0u ? count : 0u;
#endif
}

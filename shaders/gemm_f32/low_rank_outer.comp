#version 450
// Gradient of a low-rank factor: y[r, c] = sum over tokens of x[token, c] * z[token, r]  [+ y].
//
//   binding 0  x F32 [n, width], width a multiple of 4
//   binding 1  z F32 [n, rank]
//   binding 2  y F32 [rank, width]; with RANK_ROWS 0 [width, rank]
//
// A workgroup makes 32 quads along the width by eight values along the rank: quads along x, chunks of the rank along y. Each of its SLICES * 32
// threads sums every SLICES-th token; the slices are then added in order.
//
// Defines: SLICES, RANK_ROWS
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = 32, local_size_y = SLICES) in;

layout(push_constant) uniform Push {
    uint n;
    uint width;
    uint rank;
    uint add;  // 1: add to y instead of overwriting it
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { vec4 x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InZ { float z[]; };
layout(std430, set = 0, binding = 1) readonly buffer InZQuads { vec4 z4[]; };
layout(std430, set = 0, binding = 2) buffer OutY { float y[]; };

#define LOADS_IN_FLIGHT 4  // loads that a thread keeps in flight

shared vec4 parts[SLICES * 32];

void main() {
    const uint quads = p.width / 4u, lane = gl_LocalInvocationID.x, slice = gl_LocalInvocationID.y;
    const uint quad = gl_WorkGroupID.x * 32u + lane, own = min(quad, quads - 1u), first = gl_WorkGroupID.y * 8u;
    vec4 sums[8];
    [[unroll]] for (uint j = 0u; j < 8u; j++) sums[j] = vec4(0.0);
    for (uint begin = slice; begin < p.n; begin += LOADS_IN_FLIGHT * SLICES) {
        vec4 v[LOADS_IN_FLIGHT];
        [[unroll]] for (uint i = 0u; i < LOADS_IN_FLIGHT; i++) v[i] = x[min(begin + i * SLICES, p.n - 1u) * quads + own];
        [[unroll]] for (uint i = 0u; i < LOADS_IN_FLIGHT; i++) {
            const uint token = begin + i * SLICES, clamped = min(token, p.n - 1u);
            const vec4 value = token < p.n ? v[i] : vec4(0.0);
            if ((p.rank & 7u) == 0u) {
                const vec4 low = z4[(clamped * p.rank + first) / 4u], high = z4[(clamped * p.rank + first) / 4u + 1u];
                [[unroll]] for (uint j = 0u; j < 4u; j++) {
                    sums[j] += low[j] * value;
                    sums[4u + j] += high[j] * value;
                }
            } else
                [[unroll]] for (uint j = 0u; j < 8u; j++) sums[j] += z[clamped * p.rank + min(first + j, p.rank - 1u)] * value;
        }
    }
    [[unroll]] for (uint j = 0u; j < 8u; j++) {
        barrier();
        parts[slice * 32u + lane] = sums[j];
        barrier();
        if (slice == j % SLICES && quad < quads && first + j < p.rank) {
            vec4 sum = vec4(0.0);
            for (uint s = 0u; s < SLICES; s++) sum += parts[s * 32u + lane];
            [[unroll]] for (uint e = 0u; e < 4u; e++) {
#if RANK_ROWS
                const uint at = (first + j) * p.width + 4u * quad + e;
#else
                const uint at = (4u * quad + e) * p.rank + first + j;
#endif
                y[at] = p.add != 0u ? y[at] + sum[e] : sum[e];
            }
        }
    }
}

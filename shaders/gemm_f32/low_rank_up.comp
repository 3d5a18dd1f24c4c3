#version 450
// Product with a low-rank factor, up from the rank: y[token, c] = sum over r of x[token, r] * factor(c, r)  [+ before[token, c]]. Many sums of
//                                                                                                           few terms
// (B A x, and d(A x) A).
//
//   binding 0  the factor: gemm_f32/low_rank.glsl
//   binding 1  x F32 [n, rank]
//   binding 2  y F32 [n, width]
//   binding 3  before F32 [n, width] (add 1), which may be y; otherwise unused, any buffer
//
// One thread per quad of TOKENS tokens: quads along x, tokens along y.
//
// Defines: WG_SIZE, RANK_ROWS
#define TOKENS 8
layout(local_size_x = WG_SIZE) in;
#include "gemm_f32/low_rank.glsl"

layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InXQuads { vec4 x4[]; };
layout(std430, set = 0, binding = 2) buffer OutY { vec4 y[]; };
layout(std430, set = 0, binding = 3) buffer InBefore { vec4 before[]; };

void main() {
    const uint quads = p.width / 4u, quad = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x, first = gl_WorkGroupID.y * TOKENS;
    if (quad >= quads) return;
    vec4 sums[TOKENS];
    [[unroll]] for (uint i = 0u; i < TOKENS; i++) sums[i] = p.add != 0u ? before[min(first + i, p.n - 1u) * quads + quad] : vec4(0.0);
    for (uint chunk = 0u; 8u * chunk < p.rank; chunk++) {
        vec4 v[8];
        load_factor(quad, chunk, v);
        [[unroll]] for (uint i = 0u; i < TOKENS; i++)
            if ((p.rank & 7u) == 0u) {
                const uint at = min(first + i, p.n - 1u) * (p.rank / 4u) + 2u * chunk;
                const vec4 low = x4[at], high = x4[at + 1u];
                [[unroll]] for (uint j = 0u; j < 4u; j++) sums[i] += low[j] * v[j];
                [[unroll]] for (uint j = 0u; j < 4u; j++) sums[i] += high[j] * v[4u + j];
            } else {
                [[unroll]] for (uint j = 0u; j < 8u; j++) {
                    const uint r = 8u * chunk + j;
                    const float own = x[min(first + i, p.n - 1u) * p.rank + min(r, p.rank - 1u)];
                    sums[i] += (r < p.rank ? own : 0.0) * v[j];
                }
            }
    }
    [[unroll]] for (uint i = 0u; i < TOKENS; i++)
        if (first + i < p.n) y[(first + i) * quads + quad] = sums[i];
}

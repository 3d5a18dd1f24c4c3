#version 450
// Product with a low-rank factor, down to the rank: y[token, r] = sum over c of x[token, c] * factor(c, r).
// Few sums, each over a whole row (A x, dy B).
//
//   binding 0  the factor: gemm_f32/low_rank.glsl
//   binding 1  x F32 [n, width]
//   binding 2  y F32 [n, rank]
//
// A workgroup makes eight sums for each of TOKENS tokens: tokens along x, chunks of the rank along y. Its threads share out the quads of the
// rows; their partial sums are added within each subgroup, then over the subgroups.
//
// Defines: WG_SIZE, RANK_ROWS
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#define TOKENS 4
layout(local_size_x = WG_SIZE) in;
#include "gemm_f32/low_rank.glsl"

layout(std430, set = 0, binding = 1) readonly buffer InX { vec4 x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };

shared float parts[(WG_SIZE + 3) / 4 * TOKENS * 8];  // of each subgroup; those have four lanes or more

void main() {
    const uint first = gl_WorkGroupID.x * TOKENS, chunk = gl_WorkGroupID.y, quads = p.width / 4u;
    float sums[TOKENS][8];
    [[unroll]] for (uint i = 0u; i < TOKENS; i++)
        [[unroll]] for (uint j = 0u; j < 8u; j++) sums[i][j] = 0.0;
    for (uint quad = gl_LocalInvocationID.x; quad < quads; quad += WG_SIZE) {
        vec4 v[8];
        load_factor(quad, chunk, v);
        [[unroll]] for (uint i = 0u; i < TOKENS; i++) {
            const vec4 own = x[min(first + i, p.n - 1u) * quads + quad];
            [[unroll]] for (uint j = 0u; j < 8u; j++) sums[i][j] += dot(own, v[j]);
        }
    }
    [[unroll]] for (uint i = 0u; i < TOKENS; i++)
        [[unroll]] for (uint j = 0u; j < 8u; j++) {
            const float sum = subgroupAdd(sums[i][j]);
            if (subgroupElect()) parts[(gl_SubgroupID * TOKENS + i) * 8u + j] = sum;
        }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < TOKENS * 8u; i += WG_SIZE) {
        float sum = 0.0;
        for (uint s = 0u; s < gl_NumSubgroups; s++) sum += parts[s * TOKENS * 8u + i];
        const uint token = first + i / 8u, r = 8u * chunk + i % 8u;
        if (token < p.n && r < p.rank) y[token * p.rank + r] = sum;
    }
}

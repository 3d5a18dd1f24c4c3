#version 450
// Packs activations as f16 in unit order (gemm/units.glsl) for gemm/coop_reg.comp; with NORM the RMS norm of each row comes first.
//
//   binding 0  x F32 [n][k]
//   binding 1  y F16; columns past the last one are not written
//   binding 2  norm weight F32 [k] (NORM 2)
//   binding 3  the overflow word (gemm/overflow.glsl)
//   bindings 4 to 6  arrivals (ARRIVES), arrivals of x (EXPECTED; common/arrivals.glsl), state of spin-waits (SPINS_ON_X, EXPECTED)
//
// With USED the rows that are packed are those of MOE_REDUCE (moe/moe_reduce.comp), and stored as they are as well:
//   binding 0  the outputs of each token's experts F32 [n][USED][k]
//   bindings 7 to 9  weights F32 [n][USED], residual F32 [n][k], sums F32 [n][k]
// A binding that a kernel does not need may be any buffer.
//
// A workgroup packs a column; with several workgroups along y, each packs a part of it. A thread packs four neighbours at a time. With NORM
// every workgroup first sums the squares of the whole row.
//
// No defines; everything is a specialization constant.
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_arithmetic : require
layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint WG = 256;  // threads
layout(constant_id = 1) const uint SG = 32;   // lanes of a subgroup
layout(constant_id = 2) const uint FM = 16;   // matrices: A is FM x FK, B is FK x FN
layout(constant_id = 3) const uint FN = 16;
layout(constant_id = 4) const uint FK = 16;
layout(constant_id = 5) const uint ROW_LANES = 4;  // as in gemm/units.glsl
layout(constant_id = 6) const uint NORM = 0;  // 0: none, 1: without weight, 2: with weight
layout(constant_id = 8) const uint SPINS_ON_X = 0;  // 1: spin on x (common/sentinel.glsl)
layout(constant_id = 9) const uint ARRIVES = 0;  // common/arrivals.glsl
layout(constant_id = 10) const uint EXPECTED = 0;  // likewise
layout(constant_id = 11) const uint USED = 0;  // experts of a token whose outputs are added; 0: x is as it is
#include "gemm/pack.glsl"
#define OVERFLOW_BINDING 3
#include "gemm/overflow.glsl"
#include "gemm/units.glsl"
#define SYNC_SENTINEL 1
#define SPINS 1
#define BIND_SYNC_STATE 6
#include "common/sentinel.glsl"
#define BIND_ARRIVALS 4
#define BIND_EXPECTED 5
#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint k;         // values of a row of x
    uint y_stride;  // 16-byte words of a column of matrices
    uint blocks;    // of ROW_LANES units each; positions past the end of a row become zeros
    float eps;
    float scale;    // factor of all values, which keeps them within 65504
} p;

layout(std430, set = 0, binding = 0) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 0) readonly buffer XQuads { vec4 x4[]; };
layout(std430, set = 0, binding = 0) coherent volatile buffer XQuadsSpun { vec4 spun_x4[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Y { float16_t y1[]; };
layout(std430, set = 0, binding = 1) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 2) readonly buffer NormWeight { float norm_weight[]; };
layout(std430, set = 0, binding = 7) readonly buffer ExpertWeights { float expert_weights[]; };
layout(std430, set = 0, binding = 8) readonly buffer Residual { vec4 residual4[]; };
layout(std430, set = 0, binding = 9) writeonly buffer Sums { vec4 sums4[]; };

shared float squares[WG / SG];

// Quads that a thread keeps in registers; those of longer rows are read a second time.
const uint CACHED_QUADS = USED != 0 ? 2 : 4;  // USED values are under way for each
vec4 cached[CACHED_QUADS], cached_weight[CACHED_QUADS];
uint x_zero = 0;  // a 0 that the compiler cannot know before x has arrived

// The sum of the experts of a token, and the residual; rows are then whole quads.
vec4 sum_of_experts(uint row, uint quad) {
    const uint quads = p.k >> 2;
    vec4 v[USED != 0 ? USED : 1];
    const vec4 rest = residual4[row * quads + quad + x_zero];
    [[unroll]] for (uint e = 0; e < USED; e++) v[e] = x4[(row * USED + e) * quads + quad + x_zero];
    vec4 sum = vec4(0.0);
    [[unroll]] for (uint e = 0; e < USED; e++) sum += expert_weights[row * USED + e + x_zero] * v[e];
    return sum + rest;
}

vec4 load_quad(uint row, uint quad) {
    if (4u * quad >= p.k) return vec4(0.0);
    if (USED != 0) return sum_of_experts(row, quad);
    if (SPINS_ON_X != 0) {  // rows are then whole quads
        vec4 v;
        SPIN_UNTIL(v = spun_x4[row * (p.k >> 2) + quad], arrived(v));
        return v;
    }
    if ((p.k & 3u) == 0u) return x4[row * (p.k >> 2) + quad];
    vec4 v;
    [[unroll]] for (uint i = 0; i < 4; i++) v[i] = 4u * quad + i < p.k ? x[row * p.k + 4u * quad + i] : 0.0;
    return v;
}

// Loads the first quads of this workgroup's part of a row, all of them before the first is used.
void load_cached(uint row, uint first, uint step) {
    if (SPINS_ON_X != 0) {
        const uint last = row * (p.k >> 2) + (p.k >> 2) - 1u;
        bool valid = true;
        SPIN_UNTIL(valid = true;
                   [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++) {
                       cached[j] = spun_x4[min(row * (p.k >> 2) + first + j * step, last)];
                       valid = valid && arrived(cached[j]);
                   }, valid);
        [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++)
            if (4u * (first + j * step) >= p.k) cached[j] = vec4(0.0);
        return;
    }
    [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++) cached[j] = load_quad(row, first + j * step);
}

float find_factor(uint row) {
    if (NORM == 0) return 1.0;
    float square = 0.0;
    [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++) square += dot(cached[j], cached[j]);
    for (uint quad = gl_LocalInvocationID.x + CACHED_QUADS * WG; 4u * quad < p.k; quad += WG) {
        const vec4 v = load_quad(row, quad);
        square += dot(v, v);
    }
    square = subgroupAdd(square);
    if (gl_SubgroupInvocationID == 0u) squares[gl_SubgroupID] = square;
    barrier();
    float sum = 0.0;
    [[unroll]] for (uint i = 0; i < WG / SG; i++) sum += squares[i];
    return inversesqrt(sum / float(p.k) + p.eps);
}

vec4 load_weight(uint quad) {
    vec4 v = vec4(1.0);
    if (NORM == 2)
        [[unroll]] for (uint i = 0; i < 4; i++) v[i] = norm_weight[min(4u * quad + i, p.k - 1u)];
    return v;
}

// Stores a sum of experts as it is.
void store_sum(uint column, uint quad, vec4 v) {
    if (USED != 0 && 4u * quad < p.k) sums4[column * (p.k >> 2) + quad] = not_sentinel(v);
}

void pack(uint column, uint quad, vec4 v) {
    const uvec2 packed = pack_four(track_overflow(v));
    if (LANE_VALUES >= 4) {
        y2[unit_place(column, 4u * quad, p.y_stride) / 4u] = packed;
    } else
        [[unroll]] for (uint i = 0; i < 4; i++)
            y1[unit_place(column, 4u * quad + i, p.y_stride)] = float16_t(unpackHalf2x16(packed[i / 2])[i % 2]);
}

void main() {
    const uint column = gl_WorkGroupID.x, first = gl_WorkGroupID.y * WG + gl_LocalInvocationID.x, step = gl_NumWorkGroups.y * WG;
    const uint quads = p.blocks * ROW_LANES * 8u;
    [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++) cached_weight[j] = load_weight(first + j * step);
    x_zero = wait_for_arrivals();
    load_cached(column, first, step);
    [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++) store_sum(column, first + j * step, cached[j]);
    const float factor = p.scale * find_factor(column);
    [[unroll]] for (uint j = 0; j < CACHED_QUADS; j++)
        if (first + j * step < quads) pack(column, first + j * step, factor * cached[j] * cached_weight[j]);
    for (uint quad = first + CACHED_QUADS * step; quad < quads; quad += step) {
        const vec4 v = load_quad(column, quad);
        store_sum(column, quad, v);
        pack(column, quad, factor * v * load_weight(quad));
    }
    report_overflow();
    arrive();
}

#version 450
// GEMM in f32 throughout: Y = X W^T, many tokens times a weight of any type, dense or grouped by experts. It is the reference of the GEMM
// family, serves `--act f32`, and is the fastest on CPU drivers.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x F32 [tokens or slots][x_stride values]
//   binding 2  y F32 [tokens or slots][y_stride values]
//   binding 3  bias F32, binding 4 residual F32, binding 5 route: as in gemm/iface.glsl
//
// Threads and tiles: gemm/rows.glsl.
//
// Defines:
//   QUANT_FILE         the decoder of the weights
//   WG, ROWS, COLS     threads, weight rows per thread, columns per tile
//   USE_SHUFFLES       1: lanes broadcast activations to each other (subgroups of eight lanes or more; WG is a multiple of the subgroup
//                      size)
//   K_TAIL             1: k is not a multiple of 32
//   GROUPED            1: columns are slots of experts
//   HAS_BIAS, HAS_RESIDUAL, GLU (0, 1, 2), GLU_ALPHA, GLU_LIMIT
#extension GL_EXT_control_flow_attributes : require
#if USE_SHUFFLES
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(local_size_x = WG) in;

#define PATH_INT 0
#define Y_F32 0
#define Y_Q8_1 1
#define Y_TYPE Y_F32
#define TILE_M (WG * ROWS)
#define TILE_N COLS
#include "quant/weights.glsl"
#include "gemm/iface.glsl"
#include "quant/place.glsl"
#include QUANT_FILE
#include "gemm/tile.glsl"

layout(std430, set = 0, binding = 1) readonly buffer X { float x1[]; };
layout(std430, set = 0, binding = 1) readonly buffer XQuads { vec4 x4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Y { float y1[]; };

vec4 weights[ROWS][8];

void decode(uint r, UnitRaw raw) { unit_decode(raw, weights[r]); }

// Four neighbouring values of a row, zeros past its end. A select, not a branch: with branches around the 32 loads of each column,
// SwiftShader's compiler, which keeps them all, takes minutes.
vec4 load_quad(uint row, uint quad) {
#if K_TAIL
    vec4 v;
    [[unroll]] for (uint i = 0; i < 4; i++) v[i] = mix(0.0, x1[row * p.x_stride + min(4u * quad + i, p.k - 1u)], 4u * quad + i < p.k);
    return v;
#else
    return x4[row * (p.x_stride >> 2) + quad];
#endif
}

#if USE_SHUFFLES
vec4 own;

void load_activations(uint row, uint unit) { own = load_quad(row, unit * 8u + (gl_SubgroupInvocationID & 7u)); }
vec4 read_quad(uint i) { return subgroupShuffle(own, i); }
#else
vec4 all_quads[8];

void load_activations(uint row, uint unit) {
    [[unroll]] for (uint i = 0; i < 8; i++) all_quads[i] = load_quad(row, unit * 8u + i);
}
vec4 read_quad(uint i) { return all_quads[i]; }
#endif

void multiply(inout float sums[ROWS]) {
    // Two chains of fma per row: a CPU core starts two per cycle, with a latency of four or five cycles.
    vec2 chains[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) chains[r] = vec2(0.0);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        const vec4 x = read_quad(i);
        [[unroll]] for (uint r = 0; r < ROWS; r++) chains[r] = fma(weights[r][i].zw, x.zw, fma(weights[r][i].xy, x.xy, chains[r]));
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) sums[r] += chains[r].x + chains[r].y;
}

#include "gemm/rows.glsl"

void main() {
    const uint tid = gl_LocalInvocationIndex;
#ifdef UNIT_TABLE
    unit_table(tid, WG);
    barrier();
#endif
    if (!find_tile()) return;
    sum_tile(tid);
    store_tile(tid);
}

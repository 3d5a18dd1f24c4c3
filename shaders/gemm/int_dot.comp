#version 450
// GEMM by packed integer dot products: Y = X W^T for many tokens, with X quantized to Q8_1 and a weight type that has bytes and scales
// (UNIT_INTS). For devices without cooperative matrices. Dense or grouped by experts.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x Q8_1 [tokens or slots], x_stride 16-byte words per row
//   binding 2  y F32 [tokens or slots][y_stride values], or Q8_1 with y_stride units per row
//   binding 3  bias F32, binding 4 residual F32, binding 5 route: as in gemm/iface.glsl
//
// Threads and tiles: gemm/rows.glsl. For a Q8_1 output each thread has four output rows (eight weight rows with GLU),
// so that eight threads share a unit.
//
// Defines:
//   QUANT_FILE         the decoder of the weights
//   WG, ROWS, COLS     threads, weight rows per thread, columns per tile
//   USE_SHUFFLES       1: lanes broadcast activations to each other (subgroups of eight lanes or more; WG is a multiple of the subgroup
//                      size)
//   GROUPED            1: columns are slots of experts
//   Y_TYPE             0: F32, 1: Q8_1, with REDUCE_SUBGROUP and SUBGROUP_SIZE of common/reduce.glsl
//   HAS_BIAS, HAS_RESIDUAL, GLU (0, 1, 2), GLU_ALPHA, GLU_LIMIT
#extension GL_EXT_control_flow_attributes : require
#if USE_SHUFFLES
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(local_size_x = WG) in;

#define PATH_INT 1
#define Y_F32 0
#define Y_Q8_1 1
#define TILE_M (WG * ROWS)
#define TILE_N COLS
#include "quant/weights.glsl"
#include "gemm/iface.glsl"
#include "common/int_dot.glsl"
#include "common/int16.glsl"
#include "quant/place.glsl"
#include QUANT_FILE
#include "gemm/tile.glsl"

layout(std430, set = 0, binding = 1) readonly buffer X { uint x1[]; };
layout(std430, set = 0, binding = 1) readonly buffer XPairs { uvec2 x2[]; };
layout(std430, set = 0, binding = 1) readonly buffer XQuads { uvec4 x4[]; };
#if Y_TYPE == Y_Q8_1
layout(std430, set = 0, binding = 2) writeonly buffer Y { uint y_words[]; };
#define WG_SIZE WG
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 2) writeonly buffer Y { float y1[]; };
#endif

// The current unit of every row, decoded as far as that is the same for all columns.
#ifdef UNIT_DOT
uint words[ROWS][UNIT_WORDS];
UnitRaw raws[ROWS];

void decode(uint r, UnitRaw raw) {
    raws[r] = raw;
    unit_words(raw, words[r]);
}
#else
uint words[ROWS][8];
vec2 scales[ROWS], biases[ROWS];

void decode(uint r, UnitRaw raw) { unit_ints(raw, words[r], scales[r], biases[r]); }
#endif

// The current unit of x: its int8, its scale d, and the sums of the int8 of its halves.
uint x_bytes[8];
float x_step;
ivec2 x_sums;

void load_activations(uint row, uint unit) {
#if USE_SHUFFLES
    // Each of eight lanes loads one word; the first two also load the scale and the sums.
    const uint lane = gl_SubgroupInvocationID & 7u, first = 4u * row * p.x_stride;
    const uint own = x1[first + 4u * unit + ((lane & 4u) != 0u ? 4u * p.w.units : 0u) + (lane & 3u)];
    const uint own_tail = x1[first + 8u * p.w.units + 2u * unit + (lane & 1u)];
    [[unroll]] for (uint i = 0; i < 8; i++) x_bytes[i] = subgroupShuffle(own, i);
    const uvec2 tail = uvec2(subgroupShuffle(own_tail, 0), subgroupShuffle(own_tail, 1));
#else
    const uint first = row * p.x_stride;
    const uvec4 low = x4[first + unit], high = x4[first + p.w.units + unit];
    [[unroll]] for (uint i = 0; i < 4; i++) {
        x_bytes[i] = low[i];
        x_bytes[i + 4] = high[i];
    }
    const uvec2 tail = x2[2u * (first + 2u * p.w.units) + unit];
#endif
    x_step = uintBitsToFloat(tail.x);
    x_sums = int16_pair(tail.y);
}

void multiply(inout float sums[ROWS]) {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
#ifdef UNIT_DOT
        sums[r] += UNIT_DOT * x_step * unit_dot(raws[r], words[r], x_bytes, x_sums);
#else
        const ivec2 halves = halves_dot(words[r], x_bytes, ivec2(0));
  #if UNIT_HALVES
        sums[r] += x_step * (dot(scales[r], vec2(halves)) - dot(biases[r], vec2(x_sums)));
  #elif UNIT_BIAS
        sums[r] += x_step * (scales[r].x * float(halves.x + halves.y) - biases[r].x * float(x_sums.x + x_sums.y));
  #else
        sums[r] += x_step * scales[r].x * float(halves.x + halves.y);
  #endif
#endif
    }
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

#version 450
// Mat-mul for few tokens by cooperative matrices: Y = X W^T, with the weights decoded in registers. Like a mat-vec, it is bound by memory
// bandwidth. So it keeps many loads of weights in flight, and uses neither shared memory nor barriers until its sums are complete.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x F16 in unit order (mat_mul/units.glsl), x_stride 16-byte words per FN columns
//   binding 2  y F32 [n][y_stride]; with Y_UNITS F16 in unit order, y_stride 16-byte words per FN columns, rows padded to whole blocks
//   binding 3  bias F32, binding 4 residual F32, binding 5 unused: as in mat_mul/iface.glsl
//   binding 6  overflow word of an F16 y (mat_mul/overflow.glsl)
//   bindings 11 to 13  arrivals (ARRIVES), arrivals of x (EXPECTED), state of spin-waits (common/arrivals.glsl)
//
// With NEXT_NORM the kernel also stores what the RMS norm of y needs, so that the next product can take y without a kernel between them:
//   binding 7  y in unit order, each row times its norm weight; UNITS_STRIDE 16-byte words per FN columns
//   binding 8  the norm weight F32 [m]
//   binding 9  F32 [n][Y_SQUARES]: for each column of y and each tile of its rows, the sum of squares
// With X_SQUARES x is such a y:
//   binding 10  F32 [n][X_SQUARES], as binding 9; each column of x is divided by its rms
//
// With KV_ROWS y is heads of Q, K and V, and bindings have another meaning:
//   binding 2  Q after RoPE, F32 [n][Q_ROWS]
//   binding 4  positions I32 [n]; where it is -1, or outside the cache, K and V are not stored
//   binding 7  cache of K, F16 [KV_ROWS / HEAD_DIM][CACHE_ROWS][HEAD_DIM]: K after RoPE
//   binding 8  cos and sin F32 [n][ROPE_PAIRS][2]; RoPE rotates neighbouring pairs
//   binding 9  cache of V, as that of K
//
// A binding that a kernel does not need may be any buffer.
//
// A workgroup makes a tile of ROW_SUBGROUPS * SUBGROUP_M weight rows by TILE_N columns (tokens). Each subgroup takes SUBGROUP_M rows, all
// columns, and every K_SUBGROUPS-th step along K (sliced-K). A step is LANE_UNITS blocks (mat_mul/units.glsl). A lane loads whole units of 32
// weights and decodes them to f16; neighbouring lanes load neighbouring units of a row. Thanks to unit order, what a lane decodes are exactly
// its own elements of matrices A. As soon as registers of weights and of x are free, they are loaded for the subgroup's next step. At the end
// the sums of all slices go to shared memory, and the thread that stores a value adds them in a fixed order.
//
// Defines: QUANT_FILE. Everything else is a specialization constant.
#include "mat_mul/matrix.glsl"
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(constant_id = 5) const uint SUBGROUP_M = 32;  // weight rows of a subgroup
layout(constant_id = 6) const uint TILE_N = 16;  // columns of a tile, a multiple of FN
layout(constant_id = 7) const uint ROW_SUBGROUPS = 1;  // subgroups side by side along the rows; the others share out K
layout(constant_id = 8) const uint ROW_LANES = 4;  // as in mat_mul/matrix.glsl
layout(constant_id = 9) const uint HAS_BIAS = 0;
layout(constant_id = 10) const uint HAS_RESIDUAL = 0;
layout(constant_id = 11) const uint GLU = 0;  // as in mat_mul/glu.glsl
layout(constant_id = 12) const float GLU_ALPHA = 1.0;
layout(constant_id = 13) const float GLU_LIMIT = 1.0;
layout(constant_id = 14) const uint Y_UNITS = 0;  // 1: y is F16 in unit order
layout(constant_id = 15) const uint LANE_UNITS = 1;  // units of a row that a lane decodes per step
layout(constant_id = 16) const uint K_ALIGNED = 0;  // 1: a step is 8 units, and rows are whole steps
layout(constant_id = 17) const uint SYNC = 0;  // 1: no stored value of an F32 y is SENTINEL (common/sentinel.glsl)
layout(constant_id = 19) const uint ARRIVES = 0;  // common/arrivals.glsl
layout(constant_id = 20) const uint EXPECTED = 0;  // likewise
layout(constant_id = 21) const uint NEXT_NORM = 0;  // 1: stores what the norm of y needs, bindings 7 to 9
layout(constant_id = 22) const uint UNITS_STRIDE = 0;  // of binding 7: 16-byte words per FN columns
layout(constant_id = 23) const uint Y_SQUARES = 0;  // sums of squares per column of y: one for each tile of rows
layout(constant_id = 24) const uint X_SQUARES = 0;  // sums of squares per column of x, a multiple of 4; 0: x is not normed here
layout(constant_id = 25) const float EPS = 0.0;  // of the norm of x
layout(constant_id = 26) const uint KV_ROWS = 0;  // not 0: y is heads: Q_ROWS rows of Q, KV_ROWS of K, KV_ROWS of V
layout(constant_id = 27) const uint Q_ROWS = 0;  // rows of Q, n_head * HEAD_DIM
layout(constant_id = 28) const uint HEAD_DIM = 4;  // a multiple of 4, as is the first row of this product
layout(constant_id = 29) const uint CACHE_ROWS = 0;  // rows of a cache, n_ctx
layout(constant_id = 30) const uint ROPE_PAIRS = 0;  // pairs of a head of Q or K that RoPE rotates, its first ones; an even number
const uint TILE_M = ROW_SUBGROUPS * SUBGROUP_M, GROUPED = 0;

#define PATH_INT 0
#define DECODES_F16
#include "quant/weights.glsl"
#include "mat_mul/iface.glsl"
#define UNITS_ALIGNED K_ALIGNED
#include "quant/place.glsl"
#include QUANT_FILE
#include "mat_mul/tile.glsl"
#include "mat_mul/glu.glsl"
#include "mat_mul/pack.glsl"
#include "mat_mul/unit_f16.glsl"
#include "mat_mul/units.glsl"
#include "rope/rotate.glsl"
#define OVERFLOW_BINDING 6
#include "mat_mul/overflow.glsl"
#define BIND_ARRIVALS 11
#define BIND_EXPECTED 12
#define BIND_SYNC_STATE 13
#include "common/arrivals.glsl"

layout(std430, set = 0, binding = 1) readonly buffer X { uvec4 x4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Y { float y1[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YQuads { vec4 y4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YHalves { float16_t y_half[]; };
layout(std430, set = 0, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, set = 0, binding = 4) readonly buffer Residual { float residual[]; };
layout(std430, set = 0, binding = 7) writeonly buffer UnitPairs { uvec2 units2[]; };
layout(std430, set = 0, binding = 7) writeonly buffer UnitHalves { float16_t units_half[]; };
layout(std430, set = 0, binding = 8) readonly buffer NextNormWeight { float next_norm_weight[]; };
layout(std430, set = 0, binding = 9) writeonly buffer YSquares { float y_squares[]; };
layout(std430, set = 0, binding = 4) readonly buffer Positions { int positions[]; };
layout(std430, set = 0, binding = 7) writeonly buffer CacheK { uvec2 cache_k[]; };
layout(std430, set = 0, binding = 8) readonly buffer Angles { vec4 angles[]; };
layout(std430, set = 0, binding = 9) writeonly buffer CacheV { uvec2 cache_v[]; };
layout(std430, set = 0, binding = 10) readonly buffer XSquares { vec4 x_squares[]; };

const uint K_SUBGROUPS = WG / SG / ROW_SUBGROUPS;
const uint MS = SUBGROUP_M / FM, NS = TILE_N / FN;
const uint OWN_ROWS = FM / ROW_GROUPS;             // rows of a matrix that a lane holds elements of
const uint UNITS = MS * OWN_ROWS;                  // units that a lane decodes per block
const uint MATRICES = 32 / LANE_VALUES;            // matrices along K per block
#if UNIT_HEADS
const bool PAIRED = K_ALIGNED != 0 && LANE_UNITS == 2 && TILE_N <= 8;  // a lane's two units have one head between them
#endif
const uint STAGE_PITCH = SUBGROUP_M / 4 + 1;
const uint STAGE_WORDS = TILE_N * STAGE_PITCH;     // sums of one subgroup

shared vec4 stages[ROW_SUBGROUPS * K_SUBGROUPS * STAGE_WORDS];  // slices of the same rows lie side by side

MATRIX_SUM sums[MS * NS];
UnitRaw raw[LANE_UNITS * UNITS];
uvec4 x[NS * BLOCK_WORDS];
uint steps, blocks;
uint x_zero = 0;  // a 0 that the compiler cannot know before x has arrived (common/arrivals.glsl)

float16_t half_at(uvec4 word, uint i) {
    const f16vec2 pair = unpackFloat2x16(word[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
}

// Unit `u` of a step, from this lane's row number i.
UnitRaw fetch_unit(uint i, uint u, uint first_row, uint step) {
    const uint row = min(first_row + i / OWN_ROWS * FM + i % OWN_ROWS * ROW_GROUPS + gl_SubgroupInvocationID / ROW_LANES, p.m - 1u);
    const uint lane = gl_SubgroupInvocationID % ROW_LANES;
    if (K_ALIGNED != 0 && LANE_UNITS == 2) return unit_load(Place(row, min(step, steps - 1u) * 8u + 2u * lane, 0u, u));
    return unit_load(place(row, min(unit_of(step * LANE_UNITS + u, lane, blocks), end_unit - 1u)));
}

// Loads unit `u` of a step, from this lane's row number i. With PAIRED the first unit keeps the head for both, and gets the next one once the
// second is decoded. Which part of it is a unit's does not depend on the step, so the shifts for that are found once.
void load_unit(uint i, uint u, uint first_row, uint step) {
    const uint own = i * LANE_UNITS + u;
    UnitRaw unit = fetch_unit(i, u, first_row, step);
#if UNIT_HEADS
    if (PAIRED) {
        unit.sub = gl_SubgroupInvocationID % ROW_LANES * 2u;
        unit.odd = u;
        if (u == 0) unit.head = raw[own].head;
        else raw[own - 1].head = unit.head;
    }
#endif
    raw[own] = unit;
}

UnitRaw loaded_unit(uint i, uint u) {
    UnitRaw unit = raw[i * LANE_UNITS + u];
#if UNIT_HEADS
    if (PAIRED) unit.head = raw[i * LANE_UNITS].head;
#endif
    return unit;
}

// Activations of few tokens have less than a GiB. With this mask the compiler sees that no address wraps at 32 bits, and puts constant offsets
// into the loads.
const uint MAX_X_INDEX = 0x03ffffffu;

// Word i of block u of a step, in matrix column n. Lanes whose column is past the last one read what the lanes of the first column read, which
// saves memory traffic.
void fetch_x(uint n, uint i, uint step, uint u) {
    uint block = step * LANE_UNITS + u;
    if (K_ALIGNED == 0) block = min(block, blocks - 1u);
    const uint lane = gl_SubgroupInvocationID, used = n * FN + lane / ROW_LANES < tile_count ? lane : lane % ROW_LANES;
    const uint first = (tile_number * NS + n) * p.x_stride + block * (BLOCK_WORDS * SG) + used + x_zero;
    x[n * BLOCK_WORDS + i] = x4[(first & MAX_X_INDEX) + i * SG];
}

// The products of one step. Registers of weights and of x are reloaded for later steps after their last use.
void multiply(uint first_row, uint step) {
    [[unroll]] for (uint u = 0; u < LANE_UNITS; u++) {
        const bool last = u + 1 == LANE_UNITS;
        const uint next_step = last ? min(step + K_SUBGROUPS, steps - 1u) : step, next_unit = last ? 0 : u + 1;
        const bool valid = LANE_UNITS == 1 || K_ALIGNED != 0 || step * LANE_UNITS + u < blocks;
        [[unroll]] for (uint i = 0; i < MS; i++) {
            uvec4 w[OWN_ROWS * 4];
            [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
                uvec4 words[4];
                unit_f16(loaded_unit(i * OWN_ROWS + r, u), valid, words);  // past the end of a row x is zero
                [[unroll]] for (uint j = 0; j < 4; j++) w[r * 4 + j] = words[j];
                load_unit(i * OWN_ROWS + r, u, first_row, step + K_SUBGROUPS);
            }
            [[unroll]] for (uint j = 0; j < MATRICES; j++) {
                MATRIX_A a;
                [[unroll]] for (uint r = 0; r < OWN_ROWS; r++)
                    [[unroll]] for (uint e = 0; e < LANE_VALUES; e++)
                        a[r * LANE_VALUES + e] = half_at(w[r * 4 + (j * LANE_VALUES + e) / 8], (j * LANE_VALUES + e) % 8);
                [[unroll]] for (uint n = 0; n < NS; n++) {
                    MATRIX_B b;
                    [[unroll]] for (uint e = 0; e < OWN_COLUMNS * LANE_VALUES; e++) {
                        const uint number = j * OWN_COLUMNS * LANE_VALUES + e;
                        b[e] = half_at(x[n * BLOCK_WORDS + number / 8], number % 8);
                    }
                    sums[i * NS + n] = coopMatMulAdd(a, b, sums[i * NS + n]);
                    const uint used = (j + 1) * OWN_COLUMNS * LANE_VALUES;  // values of x
                    if (i + 1 == MS && used % 8 == 0) fetch_x(n, used / 8 - 1, next_step, next_unit);
                }
            }
        }
    }
}

void stage_sums(uint stage) {
    [[unroll]] for (uint i = 0; i < MS; i++)
        [[unroll]] for (uint n = 0; n < NS; n++)
            coopMatStore(sums[i * NS + n], stages, stage * STAGE_WORDS + n * FN * STAGE_PITCH + i * FM / 4, STAGE_PITCH,
                         gl_CooperativeMatrixLayoutColumnMajor);
}

// Sums of four neighbouring rows of column c, over all slices in order. row: the first one, within the tile.
vec4 sum_slices(uint row, uint c) {
    vec4 v = vec4(0.0);
    [[unroll]] for (uint slice = 0; slice < K_SUBGROUPS; slice++)
        v += stages[(row / SUBGROUP_M * K_SUBGROUPS + slice) * STAGE_WORDS + c * STAGE_PITCH + row % SUBGROUP_M / 4u];
    return v;
}

const uint OUT_SHIFT = GLU != 0 ? 1 : 0;
const uint OUT_QUADS = TILE_M >> (2 + OUT_SHIFT);

// Residuals of a column for four neighbouring rows, the first of which is row `matrix_row` of the weight.
vec4 load_residuals(uint matrix_row, uint column) {
    vec4 v = vec4(0.0);
    [[unroll]] for (uint e = 0; e < 4; e++)
        if (matrix_row + e < p.m) v[e] = residual[column * p.y_stride + p.y_offset + matrix_row + e + x_zero];
    return v;
}

// Norm weights of four neighbouring rows.
vec4 load_norm_weights(uint row) {
    vec4 v;
    [[unroll]] for (uint e = 0; e < 4; e++) v[e] = next_norm_weight[row + e];
    return v;
}

// Of the first four rows that each thread stores. They are loaded before the products, which hide the latency, and kept here meanwhile: the
// products leave no registers for them.
const uint FIRST_ITEMS = TILE_N * OUT_QUADS < WG ? TILE_N * OUT_QUADS : WG;
shared vec4 first_residuals[HAS_RESIDUAL != 0 ? FIRST_ITEMS : 1], first_norm_weights[NEXT_NORM != 0 ? FIRST_ITEMS : 1];

shared float column_factors[TILE_N];

// Where columns are few, their factors are found ahead of the products, while the first x is under way. Otherwise the sums of squares would
// take too many registers, and are loaded after the products.
const bool FACTORS_FIRST = TILE_N <= 8;

// Finds 1 / rms of each column of x. The sums of squares are loaded all at once.
void find_column_factors() {
    const uint subgroups = WG / SG, each = (TILE_N + subgroups - 1u) / subgroups, quads = X_SQUARES / 4u;
    const uint lane_quads = X_SQUARES != 0 ? (quads + SG - 1u) / SG : 1u;  // GLSL has no empty arrays
    vec4 parts[each * lane_quads];
    [[unroll]] for (uint i = 0; i < each * lane_quads; i++) {
        const uint c = gl_SubgroupID + i / lane_quads * subgroups, quad = i % lane_quads * SG + gl_SubgroupInvocationID;
        const bool valid = c < tile_count && quad < quads;
        parts[i] = valid ? x_squares[(tile_column + c) * quads + quad + x_zero] : vec4(0.0);
    }
    [[unroll]] for (uint j = 0; j < each; j++) {
        vec4 sum = vec4(0.0);
        [[unroll]] for (uint i = 0; i < lane_quads; i++) sum += parts[j * lane_quads + i];
        const float square = subgroupAdd((sum.x + sum.y) + (sum.z + sum.w));
        const uint c = gl_SubgroupID + j * subgroups;
        if (gl_SubgroupInvocationID == 0u && c < tile_count) column_factors[c] = inversesqrt(square / float(p.k) + EPS);
    }
}

// Four neighbouring output rows of column c of the tile. row: the first one, within the tile; first: whether they are the first that this
// thread stores.
vec4 apply_epilogue(uint row, uint c, uint column, bool first) {
    vec4 v[2];
    const uint quads = GLU != 0 ? 2 : 1, matrix_row = tile_row + row;
    [[unroll]] for (uint i = 0; i < quads; i++) {
        v[i] = UNIT_F16_SCALE * (X_SQUARES != 0 ? p.y_scale * column_factors[c] : p.y_scale) * sum_slices(row + 4u * i, c);
        if (HAS_BIAS != 0)
            [[unroll]] for (uint e = 0; e < 4; e++) v[i][e] += bias[p.w_row0 + min(matrix_row + 4u * i + e, p.m - 1u)];
    }
    if (GLU != 0) return vec4(glu(v[0].x, v[0].y), glu(v[0].z, v[0].w), glu(v[1].x, v[1].y), glu(v[1].z, v[1].w));
    if (HAS_RESIDUAL != 0) v[0] += first ? first_residuals[gl_LocalInvocationID.x] : load_residuals(matrix_row, column);
    return v[0];
}

// Stores four neighbouring rows of a column in unit order, as the next product reads them.
void store_units(uint column, uint row, vec4 v) {
    const uvec2 packed = pack_four(track_overflow(p.out_scale * v));
    const uint stride = NEXT_NORM != 0 ? UNITS_STRIDE : p.y_stride;
    if (LANE_VALUES >= 4) {
        const uint at = unit_place(column, row, stride) / 4u;
        if (NEXT_NORM != 0) units2[at] = packed;
        else y2[at] = packed;
    } else
        [[unroll]] for (uint e = 0; e < 4; e++) {
            const float16_t half_value = float16_t(unpackHalf2x16(packed[e / 2])[e % 2]);
            if (NEXT_NORM != 0) units_half[unit_place(column, row + e, stride)] = half_value;
            else y_half[unit_place(column, row + e, stride)] = half_value;
        }
}

// With NEXT_NORM: stores four neighbouring rows times their norm weights in unit order, and the sum of squares of the tile's part of the
// column. Rows are whole tiles; OUT_QUADS neighbouring lanes share a column.
void store_next_norm(uint column, uint row, uint quad, vec4 v, vec4 weights) {
    float square = dot(v, v);
    [[unroll]] for (uint lanes = 1; lanes < OUT_QUADS; lanes *= 2) square += subgroupShuffleXor(square, lanes);
    if (quad == 0u) y_squares[column * Y_SQUARES + tile_row / TILE_M] = square;
    store_units(column, row, v * weights);
}

// With KV_ROWS: of the first four rows that this thread stores. Loaded after the products.
vec4 first_angles;
int first_position;

// cos and sin for four neighbouring rows, which are two pairs; zeros where nothing is rotated.
vec4 angles_of(uint row, uint column) {
    const uint place = row % HEAD_DIM;
    return row < Q_ROWS + KV_ROWS && place < 2u * ROPE_PAIRS ? angles[(column * ROPE_PAIRS + place / 2u) / 2u] : vec4(0.0);
}

// Rotates four neighbouring rows of a column and stores them. row: the first one, counted over all heads of Q, K and V.
void store_heads(uint column, uint row, vec4 v, vec4 angle, int position) {
    const uint place = row % HEAD_DIM;
    if (row < Q_ROWS + KV_ROWS && place < 2u * ROPE_PAIRS) v = vec4(rotate_pair(v.xy, angle.xy), rotate_pair(v.zw, angle.zw));
    if (row < Q_ROWS) {
        y4[(column * Q_ROWS + row) / 4u] = v;
        return;
    }
    if (position < 0 || uint(position) >= CACHE_ROWS) return;
    const bool key = row < Q_ROWS + KV_ROWS;
    const uint cached = row - Q_ROWS - (key ? 0u : KV_ROWS);
    const uint at = ((cached / HEAD_DIM * CACHE_ROWS + uint(position)) * HEAD_DIM + place) / 4u;
    const uvec2 halves = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
    if (key) cache_k[at] = halves;
    else cache_v[at] = halves;
}

void store_tile() {
    const uint rows = p.m >> OUT_SHIFT;
    for (uint item = gl_LocalInvocationID.x; item < tile_count * OUT_QUADS; item += WG) {
        const uint c = item / OUT_QUADS, quad = item % OUT_QUADS, row = (tile_row >> OUT_SHIFT) + 4u * quad;
        if (row >= rows) continue;
        const bool first_item = TILE_N * OUT_QUADS <= WG || item < WG;
        vec4 v = apply_epilogue(quad << (2 + OUT_SHIFT), c, tile_column + c, first_item);
        if (KV_ROWS != 0) {
            const uint column = tile_column + c, head_row = p.y_offset + row;
            store_heads(column, head_row, v, first_item ? first_angles : angles_of(head_row, column),
                        first_item ? first_position : positions[column]);
            continue;
        }
        if (Y_UNITS != 0) {
            store_units(tile_column + c, row, v);
            continue;
        }
        if (NEXT_NORM != 0) store_next_norm(tile_column + c, row, quad, v, first_item ? first_norm_weights[item] : load_norm_weights(row));
        if (SYNC != 0) v = mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(SENTINEL)));
        const uint at = (tile_column + c) * p.y_stride + p.y_offset + row;
        if ((at & 3u) == 0u && row + 3u < rows) y4[at >> 2] = v;
        else
            [[unroll]] for (uint e = 0; e < 4; e++)
                if (row + e < rows) y1[at + e] = v[e];
    }
}

void main() {
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, WG);
    barrier();
#endif
    if (!find_tile()) {
        arrive();
        return;
    }
    const uint row_subgroup = gl_SubgroupID / K_SUBGROUPS, slice = gl_SubgroupID % K_SUBGROUPS;
    const uint first_row = tile_row + row_subgroup * SUBGROUP_M;
    blocks = (end_unit + ROW_LANES - 1u) / ROW_LANES;
    steps = (blocks + LANE_UNITS - 1u) / LANE_UNITS;
    [[unroll]] for (uint i = 0; i < UNITS; i++)
        [[unroll]] for (uint u = 0; u < LANE_UNITS; u++) load_unit(i, u, first_row, slice);
    const uint first_item = gl_LocalInvocationID.x, first_quad_row = tile_row + first_item % OUT_QUADS * 4u;
    const bool has_item = first_item < tile_count * OUT_QUADS;
    if (NEXT_NORM != 0 && has_item) first_norm_weights[first_item] = load_norm_weights(first_quad_row);
    x_zero = wait_for_arrivals();  // meanwhile the first weights are in flight
    [[unroll]] for (uint n = 0; n < NS; n++)
        [[unroll]] for (uint i = 0; i < BLOCK_WORDS; i++) fetch_x(n, i, min(slice, steps - 1u), 0);
    if (HAS_RESIDUAL != 0 && has_item)
        first_residuals[first_item] = load_residuals(first_quad_row, tile_column + first_item / OUT_QUADS);
    [[unroll]] for (uint i = 0; i < MS * NS; i++) sums[i] = MATRIX_SUM(0.0);
    if (X_SQUARES != 0 && FACTORS_FIRST) find_column_factors();
    [[dont_unroll]] for (uint step = slice; step < steps; step += K_SUBGROUPS) multiply(first_row, step);
    if (KV_ROWS != 0 && has_item) {
        const uint column = tile_column + first_item / OUT_QUADS;
        first_position = positions[column];
        first_angles = angles_of(p.y_offset + first_quad_row, column);
    }
    if (X_SQUARES != 0 && !FACTORS_FIRST) find_column_factors();
    stage_sums(gl_SubgroupID);
    barrier();
    store_tile();
    if (Y_UNITS != 0 || NEXT_NORM != 0) report_overflow();
    arrive();
}

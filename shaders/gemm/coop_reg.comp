#version 450
// GEMM for few tokens by cooperative matrices, weights decoded in registers (gemm/coop_reg.glsl): Y = X W^T, with bias, residual or GLU.
//
//   binding 2   y F32 [n][y_stride]; with Y_UNITS F16 in unit order, y_stride 16-byte words per FN columns, rows padded to whole blocks
//   binding 4   residual F32, as in gemm/iface.glsl
//   binding 10  overflow word of an F16 y (gemm/overflow.glsl)
//
// With NEXT_NORM the kernel also stores what the RMS norm of y needs, so that the next product can take y without a kernel between them:
//   binding 11  y in unit order, each row times its norm weight; UNITS_STRIDE 16-byte words per FN columns
//   binding 12  the norm weight F32 [m]
//   binding 13  F32 [n][Y_SQUARES]: for each column of y and each tile of its rows, the sum of squares
//
// Defines: QUANT_FILE. Everything else is a specialization constant.
#include "gemm/matrix.glsl"
layout(constant_id = 20) const uint HAS_RESIDUAL = 0;
layout(constant_id = 21) const uint GLU = 0;  // as in gemm/glu.glsl
layout(constant_id = 22) const float GLU_ALPHA = 1.0;
layout(constant_id = 23) const float GLU_LIMIT = 1.0;
layout(constant_id = 24) const uint Y_UNITS = 0;  // 1: y is F16 in unit order
layout(constant_id = 25) const uint SYNC = 0;  // 1: no stored value of an F32 y is SENTINEL (common/sentinel.glsl)
layout(constant_id = 26) const uint NEXT_NORM = 0;  // 1: stores what the norm of y needs, bindings 11 to 13
layout(constant_id = 27) const uint UNITS_STRIDE = 0;  // of binding 11: 16-byte words per FN columns
layout(constant_id = 28) const uint Y_SQUARES = 0;  // sums of squares per column of y: one for each tile of rows
const uint OUT_SHIFT = GLU != 0 ? 1 : 0;
#include "gemm/coop_reg.glsl"
#include "gemm/glu.glsl"
#define OVERFLOW_BINDING 10
#include "gemm/overflow.glsl"

layout(std430, set = 0, binding = 2) writeonly buffer Y { float y1[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YQuads { vec4 y4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YHalves { float16_t y_half[]; };
layout(std430, set = 0, binding = 4) readonly buffer Residual { float residual[]; };
layout(std430, set = 0, binding = 11) writeonly buffer Units { uvec2 units2[]; };
layout(std430, set = 0, binding = 11) writeonly buffer UnitHalves { float16_t units_half[]; };
layout(std430, set = 0, binding = 12) readonly buffer NextNormWeight { float next_norm_weight[]; };
layout(std430, set = 0, binding = 13) writeonly buffer YSquares { float y_squares[]; };

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
const uint FIRST_ITEMS = PASS_N * OUT_QUADS < WG ? PASS_N * OUT_QUADS : WG;
shared vec4 first_residuals[HAS_RESIDUAL != 0 ? FIRST_ITEMS : 1], first_norm_weights[NEXT_NORM != 0 ? FIRST_ITEMS : 1];

uint weight_row(uint row) { return row; }

void load_first() {
    const FirstItem item = first_item();
    if (NEXT_NORM != 0 && item.exists) first_norm_weights[gl_LocalInvocationID.x] = load_norm_weights(item.row);
}

void load_with_x() {
    const FirstItem item = first_item();
    if (HAS_RESIDUAL != 0 && item.exists) first_residuals[gl_LocalInvocationID.x] = load_residuals(item.row, item.column);
}

void load_after() {}

// Four neighbouring output rows of column c of the tile. row: the first one, within the tile; first: whether they are the first that this
// thread stores.
vec4 apply_epilogue(uint row, uint c, uint column, bool first) {
    vec4 v[2];
    const uint quads = GLU != 0 ? 2 : 1;
    [[unroll]] for (uint i = 0; i < quads; i++) v[i] = finished_sums(row + 4u * i, c);
    if (GLU != 0) return vec4(glu(v[0].x, v[0].y), glu(v[0].z, v[0].w), glu(v[1].x, v[1].y), glu(v[1].z, v[1].w));
    if (HAS_RESIDUAL != 0) v[0] += first ? first_residuals[gl_LocalInvocationID.x] : load_residuals(tile_row + row, column);
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

void store_tile() {
    const uint rows = p.m >> OUT_SHIFT;
    for (uint item = gl_LocalInvocationID.x; item < pass_count * OUT_QUADS; item += WG) {
        const uint c = pass_first + item / OUT_QUADS, quad = item % OUT_QUADS, row = (tile_row >> OUT_SHIFT) + 4u * quad;
        if (row >= rows) continue;
        const bool first = pass_first == 0u && (PASS_N * OUT_QUADS <= WG || item < WG);
        vec4 v = apply_epilogue(quad << (2 + OUT_SHIFT), c, tile_column + c, first);
        if (Y_UNITS != 0) {
            store_units(tile_column + c, row, v);
            continue;
        }
        if (NEXT_NORM != 0) store_next_norm(tile_column + c, row, quad, v, first ? first_norm_weights[item] : load_norm_weights(row));
        if (SYNC != 0) v = mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(SENTINEL)));
        const uint at = (tile_column + c) * p.y_stride + p.y_offset + row;
        if ((at & 3u) == 0u && row + 3u < rows) y4[at >> 2] = v;
        else
            [[unroll]] for (uint e = 0; e < 4; e++)
                if (row + e < rows) y1[at + e] = v[e];
    }
    if (Y_UNITS != 0 || NEXT_NORM != 0) report_overflow();
}

#version 450
// GEMM of few tokens by experts (MUL_MAT_ID), cooperative matrices, weights decoded in registers (gemm/coop_reg.glsl): every slot, an expert
// of a token, has a row of its own. With bias or GLU.
//
//   binding 2   y F32 [slots][y_stride]; with Y_UNITS F16 in unit order, y_stride 16-byte words per FN columns, rows padded to whole blocks,
//               whose rest is stored as zeros; rows are then a multiple of 4
//   binding 10  overflow word of an F16 y (gemm/overflow.glsl)
//
// A column has its own sums, over K in an order that does not depend on the other columns of its tile.
//
// Defines: QUANT_FILE. Everything else is a specialization constant.
#define BY_EXPERTS 1
#include "gemm/matrix.glsl"
layout(constant_id = 21) const uint GLU = 0;  // as in gemm/glu.glsl
layout(constant_id = 22) const float GLU_ALPHA = 1.0;
layout(constant_id = 23) const float GLU_LIMIT = 1.0;
layout(constant_id = 24) const uint Y_UNITS = 0;  // 1: y is F16 in unit order
layout(constant_id = 25) const uint SYNC = 0;  // 1: no stored value of an F32 y is SENTINEL (common/sentinel.glsl)
const uint OUT_SHIFT = GLU != 0 ? 1 : 0;
#include "gemm/coop_reg.glsl"
#include "gemm/glu.glsl"
#define OVERFLOW_BINDING 10
#include "gemm/overflow.glsl"

layout(std430, set = 0, binding = 2) writeonly buffer Y { float y1[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YQuads { vec4 y4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 2) writeonly buffer YHalves { float16_t y_half[]; };

uint weight_row(uint row) { return row; }

void load_first() {}

void load_with_x() {}

void load_after() {}

// Four neighbouring output rows of column c of the tile. row: the first one's row of weights, within the tile.
vec4 apply_epilogue(uint row, uint c) {
    const vec4 v = finished_sums(row, c);
    if (GLU == 0) return v;
    const vec4 w = finished_sums(row + 4u, c);
    return vec4(glu(v.x, v.y), glu(v.z, v.w), glu(w.x, w.y), glu(w.z, w.w));
}

// Stores four neighbouring rows of a column in unit order, as the next product reads them.
void store_units(uint column, uint row, vec4 v) {
    const uvec2 packed = pack_four(track_overflow(p.out_scale * v));
    if (LANE_VALUES >= 4) y2[unit_place(column, row, p.y_stride) / 4u] = packed;
    else
        [[unroll]] for (uint e = 0; e < 4; e++)
            y_half[unit_place(column, row + e, p.y_stride)] = float16_t(unpackHalf2x16(packed[e / 2])[e % 2]);
}

// Zeros for what the last block has behind the last row.
void store_padding() {
    const uint rows = p.m >> OUT_SHIFT, padded = p.y_stride / (BLOCK_WORDS * SG) * (32 * ROW_LANES), quads = (padded - rows) / 4u;
    for (uint item = gl_LocalInvocationID.x; item < tile_count * quads; item += WG)
        store_units(column_of(item / quads), rows + item % quads * 4u, vec4(0.0));
}

void store_tile() {
    const uint rows = p.m >> OUT_SHIFT;
    if (Y_UNITS != 0 && tile_row + TILE_M >= p.m) store_padding();
    for (uint item = gl_LocalInvocationID.x; item < pass_count * OUT_QUADS; item += WG) {
        const uint c = pass_first + item / OUT_QUADS, quad = item % OUT_QUADS, row = (tile_row >> OUT_SHIFT) + 4u * quad, column = column_of(c);
        if (row >= rows) continue;
        vec4 v = apply_epilogue(quad << (2 + OUT_SHIFT), c);
        if (Y_UNITS != 0) {
            store_units(column, row, v);
            continue;
        }
        if (SYNC != 0) v = mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(SENTINEL)));
        const uint at = column * p.y_stride + p.y_offset + row;
        if ((at & 3u) == 0u && row + 3u < rows) y4[at >> 2] = v;
        else
            [[unroll]] for (uint e = 0; e < 4; e++)
                if (row + e < rows) y1[at + e] = v[e];
    }
    if (Y_UNITS != 0) report_overflow();
}

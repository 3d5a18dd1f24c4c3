// Tiles in registers, without shared memory: what gemm/f32.comp and gemm/int_dot.comp share.
//
// A workgroup makes TILE_M = WG * ROWS weight rows by TILE_N = COLS columns. Thread t owns rows t * ROWS .. + ROWS - 1 of the tile, walks their
// units one after another, and keeps ROWS * COLS sums. All threads of a subgroup need the same activations at the same time. With USE_SHUFFLES
// the first eight lanes load the 32 values of a unit and broadcast them: for CPU drivers, where a shuffle costs one instruction and a load one
// per lane. Without it each thread loads them itself, all from the same address.
//
// The including file has
//   void decode(uint r, UnitRaw raw)              keeps the weights of a unit of row r
//   void load_activations(uint row, uint unit)    loads a unit of x into registers
//   void multiply(inout float sums[ROWS])         adds the products of that unit with the units of all rows

float acc[COLS][ROWS];
uint columns[COLS];

void sum_tile(uint tid) {
    [[unroll]] for (uint c = 0; c < COLS; c++) columns[c] = column_of(min(c, tile_count - 1u));
    [[unroll]] for (uint c = 0; c < COLS; c++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) acc[c][r] = 0.0;
    const uint row = tile_row + tid * ROWS;
    for (uint unit = first_unit; unit < end_unit; unit++) {
        [[unroll]] for (uint r = 0; r < ROWS; r++) decode(r, unit_load(place(tile_matrix + min(row + r, p.m - 1u), unit)));
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            load_activations(x_row_of(columns[c]), unit);
            multiply(acc[c]);
        }
    }
}

layout(std430, set = 0, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, set = 0, binding = 4) readonly buffer Residual { float residual[]; };

#include "gemm/glu.glsl"
#define OUT_ROWS (GLU != 0 ? ROWS / 2 : ROWS)

// The sum of row r and column c plus the bias of its row.
float add_bias(uint row, uint r, uint c) {
    return HAS_BIAS != 0 ? p.y_scale * acc[c][r] + bias[p.w_row0 + tile_matrix + min(row + r, p.m - 1u)] : p.y_scale * acc[c][r];
}

// Output row i of this thread for column c, after bias, GLU and residual.
float apply_epilogue(uint row, uint i, uint c) {
    if (GLU != 0) return glu(add_bias(row, 2u * i, c), add_bias(row, 2u * i + 1u, c));
    float v = add_bias(row, i, c);
    const uint stride = p.y_stride * (Y_TYPE == Y_Q8_1 ? 32u : 1u);  // the residual is F32, whatever the output is
    if (HAS_RESIDUAL != 0 && c < tile_count && row + i < p.m) v += residual[columns[c] * stride + p.y_offset + row + i];
    return v;
}

void store_tile(uint tid) {
    const uint row = tile_row + tid * ROWS;
#if Y_TYPE == Y_Q8_1
    // Eight neighbouring threads share the 32 values of a unit.
    const uint quad = (p.y_offset + (tile_row >> (GLU != 0 ? 1 : 0))) / 4u + tid, rows = GLU != 0 ? p.m / 2u : p.m;
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        vec4 v;
        [[unroll]] for (uint i = 0; i < 4; i++) v[i] = row + (GLU != 0 ? 2u * i : i) < p.m ? apply_epilogue(row, i, c) : 0.0;
        const Q8_1Quad packed = q8_1_pack(quad, v);
        if (c < tile_count && (quad & ~7u) * 4u < p.y_offset + rows) q8_1_store(columns[c], p.y_stride, quad, packed);
    }
#else
    [[unroll]] for (uint c = 0; c < COLS; c++)
        [[unroll]] for (uint i = 0; i < OUT_ROWS; i++)
            if (c < tile_count && row + (GLU != 0 ? 2u * i : i) < p.m)
                y1[columns[c] * p.y_stride + p.y_offset + (row >> (GLU != 0 ? 1 : 0)) + i] = apply_epilogue(row, i, c);
#endif
}

#version 450
// y = A W in f32, with a stored weight of any type: dX = dY W. One batch.
//
//   binding 0  W, k rows of n values, planes (quant/weights.glsl)
//   binding 1  A, binding 2  y, threads and defines: gemm_f32/gemm.glsl
//
// A thread decodes one unit of 32 values at a time into the tile of B. Values outside become 0 by a select:
// SwiftShader takes minutes to compile 32 branches in a row.
//
// Defines: QUANT_FILE; TN is 4 or 8
#extension GL_EXT_control_flow_attributes : require
#include "quant/weights.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
    Weights w;
    uint m;
    uint n;
    uint k;
    uint splits;
    uint k_per_split;  // values of k per split, a multiple of DEPTH
    uint stride;   // from row to row of A (A_TRANSPOSED: from column to column)
    uint a_column0;  // column of A that belongs to row 0 of W: a weight may come in shards
    uint add;      // 1: add to y instead of overwriting it
    uint y_split0;  // where the first split goes in y
} p;
#include "quant/place.glsl"
#include QUANT_FILE

#define TILE_N (8 * TN)
#define PITCH_N (TILE_N + 4)
shared float b_tile[DEPTH * PITCH_N];

void load_b(uint k0, uint end, uint column, uint batch, uint t) {
    [[unroll]] for (uint e = 0u; e < (TILE_N / 32u * DEPTH + 63u) / 64u; e++) {
        const uint i = e * 64u + t, k = i / (TILE_N / 32u), unit = i % (TILE_N / 32u);
        if (k < DEPTH) {
            vec4 v[8];
            const bool valid = k0 + k < end && column / 32u + unit < p.w.units;
            if (valid) unit_decode(unit_load(place(k0 + k, column / 32u + unit)), v);
            [[unroll]] for (uint j = 0u; j < 8u; j++)
                [[unroll]] for (uint c = 0u; c < 4u; c++) b_tile[k * PITCH_N + 32u * unit + 4u * j + c] = mix(0.0, v[j][c], valid);
        }
    }
}

#include "gemm_f32/gemm.glsl"

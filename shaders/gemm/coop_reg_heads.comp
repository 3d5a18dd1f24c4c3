#version 450
// GEMM for few tokens by cooperative matrices, weights decoded in registers (gemm/coop_reg.glsl), whose rows are heads of Q, K and V:
// RoPE rotates those of Q and K, and K and V go into the KV cache.
//
//   binding 2   Q after RoPE, F32 [n][Q_ROWS]
//   binding 4   positions I32 [n]; where it is -1, or outside the cache, K and V are not stored
//   binding 10  cache of K, F16 [KV_ROWS / HEAD_DIM][CACHE_ROWS][HEAD_DIM]: K after RoPE
//   binding 11  cache of V, as that of K
//   binding 12  cos and sin F32 [n][ROPE_PAIRS][2]
//
// Rows are counted over all heads: first those of Q, then of K, then of V. A product may make some of them; y_offset is its first one.
//
// RoPE rotates neighbouring rows. With NEOX, where row i of a head is paired with i + ROPE_PAIRS, a tile takes its rows in such an order that
// pairs are neighbours: any row is read at the same cost. Heads are then whole.
//
// Defines: QUANT_FILE. Everything else is a specialization constant.
#include "gemm/matrix.glsl"
layout(constant_id = 20) const uint Q_ROWS = 0;  // rows of Q, n_head * HEAD_DIM
layout(constant_id = 21) const uint KV_ROWS = 0;  // rows of K, and of V
layout(constant_id = 22) const uint HEAD_DIM = 4;  // a multiple of 4, as is the first row of this product
layout(constant_id = 23) const uint CACHE_ROWS = 0;  // rows of a cache, n_ctx
layout(constant_id = 24) const uint ROPE_PAIRS = 0;  // pairs of a head of Q or K that RoPE rotates, its first ones; an even number
layout(constant_id = 25) const uint NEOX = 0;  // 1: pairs of rows i and i + ROPE_PAIRS, 0: of neighbours
const uint OUT_SHIFT = 0;
#include "gemm/coop_reg.glsl"
#include "rope/rotate.glsl"
#include "cache/f16_bits.glsl"

layout(std430, set = 0, binding = 2) writeonly buffer Q { vec4 q4[]; };
layout(std430, set = 0, binding = 2) writeonly buffer QPairs { vec2 q2[]; };
layout(std430, set = 0, binding = 4) readonly buffer Positions { int positions[]; };
layout(std430, set = 0, binding = 10) writeonly buffer CacheK { uvec2 cache_k[]; };
layout(std430, set = 0, binding = 10) writeonly buffer CacheKPairs { uint cache_k_pairs[]; };
layout(std430, set = 0, binding = 11) writeonly buffer CacheV { uvec2 cache_v[]; };
layout(std430, set = 0, binding = 12) readonly buffer Angles { vec4 angles[]; };

// Of the first four rows that this thread stores. Loaded after the products.
vec4 first_angles;
int first_position;

// Whether RoPE rotates a row, counted over all heads.
bool is_rotated(uint row) { return row < Q_ROWS + KV_ROWS && row % HEAD_DIM < 2u * ROPE_PAIRS; }

uint weight_row(uint row) {
    const uint place = (p.y_offset + row) % HEAD_DIM;
    return NEOX != 0 && is_rotated(p.y_offset + row) ? row - place + place / 2u + place % 2u * ROPE_PAIRS : row;
}

// cos and sin for four neighbouring rows, which are two pairs; zeros where nothing is rotated.
vec4 angles_of(uint row, uint column) {
    const uint place = row % HEAD_DIM;
    return is_rotated(row) ? angles[(column * ROPE_PAIRS + place / 2u) / 2u] : vec4(0.0);
}

// Rotates four neighbouring rows of a column and stores them. row: the first one, counted over all heads of Q, K and V.
void store_heads(uint column, uint row, vec4 v, vec4 angle, int position) {
    const uint place = row % HEAD_DIM;
    const bool rotated = is_rotated(row), apart = NEOX != 0 && rotated;  // apart: two values of places from place / 2 on, two ROPE_PAIRS behind them
    if (rotated) v = vec4(rotate_pair(v.xy, angle.xy), rotate_pair(v.zw, angle.zw));
    if (row < Q_ROWS) {
        const uint at = column * Q_ROWS + row - place;
        if (apart) {
            q2[(at + place / 2u) / 2u] = v.xz;
            q2[(at + place / 2u + ROPE_PAIRS) / 2u] = v.yw;
        } else q4[(at + place) / 4u] = v;
        return;
    }
    if (position < 0 || uint(position) >= CACHE_ROWS) return;
    const bool key = row < Q_ROWS + KV_ROWS;
    const uint cached = row - Q_ROWS - (key ? 0u : KV_ROWS);
    const uint at = (cached / HEAD_DIM * CACHE_ROWS + uint(position)) * HEAD_DIM;
    if (apart) {
        cache_k_pairs[(at + place / 2u) / 2u] = f16_bits_of(v.xz);
        cache_k_pairs[(at + place / 2u + ROPE_PAIRS) / 2u] = f16_bits_of(v.yw);
        return;
    }
    const uvec2 halves = uvec2(f16_bits_of(v.xy), f16_bits_of(v.zw));
    if (key) cache_k[(at + place) / 4u] = halves;
    else cache_v[(at + place) / 4u] = halves;
}

void load_first() {}

void load_with_x() {}

void load_after() {
    const FirstItem item = first_item();
    if (!item.exists) return;
    first_position = positions[item.column];
    first_angles = angles_of(p.y_offset + item.row, item.column);
}

void store_tile() {
    for (uint item = gl_LocalInvocationID.x; item < pass_count * OUT_QUADS; item += WG) {
        const uint c = pass_first + item / OUT_QUADS, quad = item % OUT_QUADS, row = tile_row + 4u * quad;
        if (row >= p.m) continue;
        const bool first = pass_first == 0u && (PASS_N * OUT_QUADS <= WG || item < WG);
        const uint column = tile_column + c, head_row = p.y_offset + row;
        store_heads(column, head_row, finished_sums(4u * quad, c), first ? first_angles : angles_of(head_row, column),
                    first ? first_position : positions[column]);
    }
}

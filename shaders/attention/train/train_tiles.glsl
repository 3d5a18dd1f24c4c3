// Tiles of 32 x 32 values in shared memory and their products, computed by 64 threads: what the tiled training kernels of attention share.
//
// Thread (tx, ty) of 8 x 8 has rows 4 ty .. 4 ty + 3 and columns 4 tx .. 4 tx + 3 of a product.
#define BLOCK_ROWS 32u
#include "attention/train/train_rules.glsl"

layout(local_size_x = 64) in;

#define PITCH 33u
shared float tile_a[32 * 33];
shared float tile_b[32 * 33];
shared float weights[32 * 33];

#define tx (gl_LocalInvocationIndex & 7u)
#define ty (gl_LocalInvocationIndex >> 3)

// Fills a tile; VALUE is an expression in row r and column c.
#define FILL_TILE(TILE, VALUE)                                      \
    [[unroll]] for (uint e = 0u; e < 16u; e++) {                    \
        const uint r = 2u * e + (t >> 5), c = t & 31u;              \
        TILE[r * PITCH + c] = VALUE;                                \
    }

#define ZERO_TILE(SUM)                                              \
    [[unroll]] for (uint i = 0u; i < 4u; i++)                       \
        [[unroll]] for (uint j = 0u; j < 4u; j++) SUM[i][j] = 0.0;

// sum += A B^T, of tile_a and tile_b
void add_a_by_b_transposed(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(tile_a[(4u * ty + i) * PITCH + d], tile_b[(4u * tx + j) * PITCH + d], sum[i][j]);
}

// sum += weights B
void add_weights_by_b(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(weights[(4u * ty + i) * PITCH + d], tile_b[d * PITCH + 4u * tx + j], sum[i][j]);
}

// sum += weights^T B
void add_weights_transposed_by_b(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(weights[d * PITCH + 4u * ty + i], tile_b[d * PITCH + 4u * tx + j], sum[i][j]);
}

// Dot products to scores, in place: scaled and soft-capped.
void to_scores(inout float product[4][4]) {
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        [[unroll]] for (uint j = 0u; j < 4u; j++) product[i][j] *= p.scale;
    if (p.softcap != 0.0)
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            [[unroll]] for (uint j = 0u; j < 4u; j++) product[i][j] = p.softcap * tanh_exact(product[i][j] / p.softcap);
}

bool inside(uint row, uint column, uint dim) { return all(lessThan(uvec2(row, column), uvec2(p.n, dim))); }

// A value of a tensor [tokens, heads, dim]; 0 outside of it.
#define VALUE_OF(BUFFER, SEQUENCE, ROW, HEADS, HEAD, DIM, COLUMN)                                                                         \
    mix(0.0, BUFFER[mix(0u, (((SEQUENCE) * p.n + (ROW)) * (HEADS) + (HEAD)) * (DIM) + (COLUMN), inside(ROW, COLUMN, DIM))], inside(ROW, COLUMN, DIM))

// Tiles of 32 x 32 values in shared memory, and their products, by 64 threads: what the kernels of attention in training have in common.
//
// q F32 [tokens, n_head, hd], k F32 [tokens, n_head_kv, hd], v F32 [tokens, n_head_kv, vd]; the tokens are texts of p.n tokens, one after the other.
// Token i of a text sees token j of it where visible(i, j) says so. Thread (tx, ty) of 8 x 8 has rows 4 ty .. 4 ty + 3 and columns 4 tx .. 4 tx + 3 of
// a tile.
#extension GL_EXT_control_flow_attributes : require
#include "elementwise/functions.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
    uint n;             // tokens of a text
    uint n_head;
    uint n_head_kv;
    uint hd;
    uint vd;
    uint causal;        // 0: every token sees its whole text
    uint window;        // tokens that a token sees at most; 0: no bound
    uint parts;         // along the columns of what is made: 32 CHUNKS a part
    uint heads_each;    // heads of Q that a workgroup adds up
    float scale;
    float softcap;      // 0: none
} p;

#define PITCH 33u
shared float left[32 * 33];
shared float right[32 * 33];
shared float weights[32 * 33];

#define t gl_LocalInvocationIndex
#define tx (gl_LocalInvocationIndex & 7u)
#define ty (gl_LocalInvocationIndex >> 3)

// A tile of what VALUE is at row r and column c.
#define FILL_TILE(TILE, VALUE)                                      \
    [[unroll]] for (uint e = 0u; e < 16u; e++) {                    \
        const uint r = 2u * e + (t >> 5), c = t & 31u;              \
        TILE[r * PITCH + c] = VALUE;                                \
    }

#define ZERO_TILE(SUM)                                              \
    [[unroll]] for (uint i = 0u; i < 4u; i++)                       \
        [[unroll]] for (uint j = 0u; j < 4u; j++) SUM[i][j] = 0.0;

// sum += left right^T
void add_rows_by_rows(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(left[(4u * ty + i) * PITCH + d], right[(4u * tx + j) * PITCH + d], sum[i][j]);
}

// sum += weights right
void add_weights_by_right(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(weights[(4u * ty + i) * PITCH + d], right[d * PITCH + 4u * tx + j], sum[i][j]);
}

// sum += weights^T right
void add_turned_by_right(inout float sum[4][4]) {
    for (uint d0 = 0u; d0 < 32u; d0 += 4u)
        [[unroll]] for (uint d = d0; d < d0 + 4u; d++)
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                [[unroll]] for (uint j = 0u; j < 4u; j++)
                    sum[i][j] = fma(weights[d * PITCH + 4u * ty + i], right[d * PITCH + 4u * tx + j], sum[i][j]);
}

// What is decided for each value of a tile is a select, not a branch: a load in a branch waits alone, and SwiftShader's compiler takes minutes for some
// dozens of branches one after the other. mix() and && of variables are selects; ?: and && of expressions are not.
bool visible(uint i, uint j) {
    const bool there = all(lessThan(uvec2(i, j), uvec2(p.n)));
    const bool causal = p.causal != 0u, later = j > i;
    const bool windowed = p.window != 0u, left_behind = j + p.window <= i;
    const bool hidden = later || (windowed && left_behind);
    return there && !(causal && hidden);
}

// Scaled and capped, in place.
void to_scores(inout float product[4][4]) {
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        [[unroll]] for (uint j = 0u; j < 4u; j++) product[i][j] *= p.scale;
    if (p.softcap != 0.0)
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            [[unroll]] for (uint j = 0u; j < 4u; j++) product[i][j] = p.softcap * tanh_exact(product[i][j] / p.softcap);
}

// Derivative of a score by the product that it is made of.
float score_slope(float s) {
    const float part = mix(s / p.softcap, 0.0, p.softcap == 0.0);
    return p.scale * (1.0 - part * part);
}

// Tiles of keys that the queries from q0 on see: the first, and the last.
uint first_keys(uint q0) { return p.causal != 0u && p.window != 0u && q0 + 1u > p.window ? (q0 + 1u - p.window) / 32u : 0u; }
uint last_keys(uint q0) { return (p.causal != 0u ? min(q0 + 31u, p.n - 1u) : p.n - 1u) / 32u; }
// And of queries that see the keys from k0 on.
uint first_queries(uint k0) { return p.causal != 0u ? k0 / 32u : 0u; }
uint last_queries(uint k0) {
    return (p.causal != 0u && p.window != 0u ? min(k0 + 31u + p.window - 1u, p.n - 1u) : p.n - 1u) / 32u;
}

bool inside(uint row, uint column, uint dim) { return all(lessThan(uvec2(row, column), uvec2(p.n, dim))); }

// Value of a row of a tensor [tokens, heads, dim]; 0 outside.
#define VALUE_OF(BUFFER, TEXT, ROW, HEADS, HEAD, DIM, COLUMN)                                                                             \
    mix(0.0, BUFFER[mix(0u, (((TEXT) * p.n + (ROW)) * (HEADS) + (HEAD)) * (DIM) + (COLUMN), inside(ROW, COLUMN, DIM))], inside(ROW, COLUMN, DIM))

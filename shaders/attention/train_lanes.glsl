// Attention of texts to themselves for CPU drivers, without shared memory: what its kernels of training have in common.
//
// q F32 [tokens, n_head, HD], k F32 [tokens, n_head_kv, HD], v F32 [tokens, n_head_kv, VD]; the tokens are texts of p.n tokens, one after the other.
// Token i of a text sees token j of it where visible(i, j) says so.
//
// A workgroup is one subgroup of LANES threads. Each has a row of its own (a query or a key of the head) in registers, and loads one of LANES rows of the
// other side, whose values then go from lane to lane: a broadcast costs one instruction there, a load one for each lane.
//
// Defines: LANES, HD and VD (values of a head)
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "elementwise/functions.glsl"

layout(local_size_x = LANES) in;

layout(push_constant) uniform Push {
    uint n;             // tokens of a text
    uint n_head;
    uint n_head_kv;
    uint hd;
    uint vd;
    uint causal;        // 0: every token sees its whole text
    uint window;        // tokens that a token sees at most; 0: no bound
    uint parts;         // 1
    uint heads_each;    // heads of Q that a workgroup adds up
    float scale;
    float softcap;      // 0: none
} p;

#define t gl_LocalInvocationIndex
#define HD4 ((HD + 3) / 4)
#define VD4 ((VD + 3) / 4)

// Row of a tensor [tokens, heads, DIM] into vec4 TO[]; zeros behind DIM. A row outside the text is the text's last one: nothing sees it.
#define LOAD_ROW(TO, BUFFER, TEXT, ROW, HEADS, HEAD, DIM)                                                          \
    {                                                                                                              \
        const uint at = (((TEXT) * p.n + min(ROW, p.n - 1u)) * (HEADS) + (HEAD)) * DIM;                            \
        [[unroll]] for (uint d = 0u; d < (DIM + 3) / 4; d++)                                                       \
            [[unroll]] for (uint c = 0u; c < 4u; c++) TO[d][c] = 4u * d + c < DIM ? BUFFER[at + 4u * d + c] : 0.0; \
    }

#define STORE_ROW(FROM, BUFFER, ROW, DIM)                                                         \
    [[unroll]] for (uint d = 0u; d < (DIM + 3) / 4; d++)                                          \
        [[unroll]] for (uint c = 0u; c < 4u; c++)                                                 \
            if (4u * d + c < DIM) BUFFER[(ROW) * DIM + 4u * d + c] = FROM[d][c];

// Product of a row of one's own and the row that lane I has.
#define PRODUCT(RESULT, OWN, OTHER, COUNT, I)                                                                  \
    {                                                                                                          \
        vec4 sum = vec4(0.0);                                                                                  \
        [[unroll]] for (uint d = 0u; d < COUNT; d++) sum = fma(OWN[d], subgroupShuffle(OTHER[d], I), sum);     \
        RESULT = sum.x + sum.y + (sum.z + sum.w);                                                              \
    }

// SUMS += FACTOR times the row that lane I has.
#define ADD_ROW(SUMS, FACTOR, OTHER, COUNT, I) \
    [[unroll]] for (uint d = 0u; d < COUNT; d++) SUMS[d] = fma(vec4(FACTOR), subgroupShuffle(OTHER[d], I), SUMS[d]);

bool visible(uint i, uint j) {
    return i < p.n && j < p.n && (p.causal == 0u || (j <= i && (p.window == 0u || j + p.window > i)));
}

// Scaled and capped.
float score(float product) {
    const float s = product * p.scale;
    return p.softcap != 0.0 ? p.softcap * tanh_exact(s / p.softcap) : s;
}

// Derivative of a score by the product that it is made of.
float score_slope(float s) {
    const float part = p.softcap != 0.0 ? s / p.softcap : 0.0;
    return p.scale * (1.0 - part * part);
}

// Groups of LANES keys that the queries from q0 on see: the first, and the last.
uint first_keys(uint q0) { return p.causal != 0u && p.window != 0u && q0 + 1u > p.window ? (q0 + 1u - p.window) / LANES : 0u; }
uint last_keys(uint q0) { return (p.causal != 0u ? min(q0 + LANES - 1u, p.n - 1u) : p.n - 1u) / LANES; }
// And of queries that see the keys from k0 on.
uint first_queries(uint k0) { return p.causal != 0u ? k0 / LANES : 0u; }
uint last_queries(uint k0) {
    return (p.causal != 0u && p.window != 0u ? min(k0 + LANES - 1u + p.window - 1u, p.n - 1u) : p.n - 1u) / LANES;
}

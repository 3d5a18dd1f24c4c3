// Bindings of the prompt attention kernels, and how their queries are numbered.
//
//   binding 0  q F32 [n, n_head, HD]
//   binding 1  cache_k F16, Q8_0 or Q4_0 (K_TYPE) [n_head_kv, n_ctx, HD], read eight values at a time (attention/cache_load.glsl)
//   binding 2  cache_v, the same (V_TYPE)
//   binding 3  pos I32 [n]; -1: padding, whose output is zero. With SPANS I32 [n, 2]: the first and the last row that a token sees
//   binding 4  y: F32 [n, n_head * HD], Q8_1 rows, or packed F16 (gemm/matrix.glsl): rows of y_stride 16-byte words or, from
//              prompt_matrix.comp only, fragments, y_stride words for FN tokens
//   binding 5  sinks F32 [n_head] (HAS_SINKS); otherwise unused, any buffer
//
// The query heads of one kv head read the same rows, so they are taken together, all or some of them: the heads form gl_NumWorkGroups.y groups,
// none of which spans two kv heads. The queries of a group are numbered over tokens and heads: query i is token i / heads, head i % heads of
// the group. A workgroup takes a tile of neighbouring queries of group gl_WorkGroupID.y. The last tiles see the most rows, so they start first.

#include "attention/window.glsl"

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint n_head_kv;
    uint n_ctx;
    uint window;    // 0: none; of chunks: attention/window.glsl
    uint y_stride;  // F16: 16-byte words of a row, or of a column of matrices; otherwise unused
    float scale;    // includes log2 e
    float softcap;  // includes log2 e; read where HAS_SOFTCAP
} p;

layout(std430, set = 0, binding = 0) readonly buffer Q { vec4 q4[]; };
layout(std430, set = 0, binding = 1) readonly buffer CacheK { uvec4 k4[]; };
layout(std430, set = 0, binding = 1) readonly buffer CacheKPairs { uvec2 k2[]; };
layout(std430, set = 0, binding = 1) readonly buffer CacheKWords { uint k1[]; };
layout(std430, set = 0, binding = 2) readonly buffer CacheV { uvec4 v4[]; };
layout(std430, set = 0, binding = 2) readonly buffer CacheVPairs { uvec2 v2[]; };
layout(std430, set = 0, binding = 2) readonly buffer CacheVWords { uint v1[]; };
layout(std430, set = 0, binding = 3) readonly buffer Pos { int pos[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Y { vec4 y4[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YWords { uint y_words[]; };
layout(std430, set = 0, binding = 5) readonly buffer Sinks { float sinks[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YFragments { uvec4 y_fragments[]; };

#define OUT_F32 0u
#define OUT_Q8_1 1u
#define OUT_F16 2u
#define OUT_FRAGMENTS 3u

const float LOG2_E = 1.44269504;
const float MASKED = -3.0e38;

uint group_heads() { return p.n_head / gl_NumWorkGroups.y; }
uint kv_head() { return gl_WorkGroupID.y / (gl_NumWorkGroups.y / p.n_head_kv); }
uint first_query(uint tile_q) { return (gl_NumWorkGroups.x - 1u - gl_WorkGroupID.x) * tile_q; }
uint token_of(uint query) { return query / group_heads(); }
uint head_of(uint query) { return gl_WorkGroupID.y * group_heads() + query % group_heads(); }

// (first, end) of the rows that a query sees; (0, 0): none.
uvec2 visible_rows(uint query) {
    const uint token = token_of(query);
    if (SPANS != 0) {
        const uint last = token < p.n ? uint(pos[2u * token + 1u] + 1) : 0u;
        return last > 0u ? uvec2(uint(pos[2u * token]), min(last, p.n_ctx)) : uvec2(0u);
    }
    const int at = token < p.n ? pos[token] : -1;
    const uint end = min(uint(at + 1), p.n_ctx);
    return uvec2(end > 0u ? first_row(end, p.window) : 0u, end);
}

// The factor that normalizes a query's weighted sum, from its maximum and sum of weights; its sink, if it has one, is included here.
float normalizer(uint query, float score_max, float weight_sum) {
    if (HAS_SINKS != 0) {
        const float sink = sinks[min(head_of(query), p.n_head - 1u)] * LOG2_E;
        const float new_max = max(score_max, sink);
        const float rescale = exp2(score_max - new_max);
        return weight_sum > 0.0 ? rescale / (weight_sum * rescale + exp2(sink - new_max)) : 0.0;
    }
    return weight_sum > 0.0 ? 1.0 / weight_sum : 0.0;
}

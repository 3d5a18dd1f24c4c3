#version 450
// MUL_MAT_KQ: scores of attention as a node of its own, all arithmetic in F32.
//
//   kq[h, t, r] = q[t, h, :] . k[kv head of h, r, :] where token t sees row r, else 0
//
// Bindings:
//   0  q        F32 [n, n_head, HD], read as vec4
//   1  cache_k  F16, F32, Q8_0 or Q4_0 (CACHE_TYPE) [n_head_kv, n_ctx, HD]
//   2  pos      I32 [n], -1: padding; with SPANS I32 [n, 2]: the first and the last row that a token sees
//   3  kq       F32 [n_head, n, rows]
//   BIND_SLOTS, BIND_PAGES  (PAGE): the sequence of each token, the page table (attention/unfused/rows_seen.glsl)
//
// Workgroup (x, y, z) takes heads x * HEADS .. of one kv head, rows y * WG_SIZE .., a thread each, and tokens z * TOKENS ..: each value of K
// is read once for HEADS * TOKENS queries. A sum does not depend on the other queries. Rows that no token of it sees are not read.
//
// Defines: HD CACHE_TYPE PITCH HEADS TOKENS WG_SIZE SPANS [PAGE BIND_SLOTS BIND_PAGES]

#define QUERIES (HEADS * TOKENS)
#define HEAD4 (HD / 4)

#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint n_head_kv;
    uint n_ctx;
    uint rows;    // of a sequence
    uint window;  // attention/window.glsl
#ifdef PAGE
    uint max_pages;
#endif
} p;

layout(binding = 0) readonly buffer Q { vec4 q4[]; };
layout(binding = 1) readonly buffer Cache { uvec4 k4[]; };
layout(binding = 1) readonly buffer CachePairs { uvec2 k2[]; };
layout(binding = 1) readonly buffer CacheWords { uint k1[]; };
layout(binding = 2) readonly buffer Pos { int pos[]; };
layout(binding = 3) writeonly buffer Y { float kq[]; };

shared vec4 query4[QUERIES * HEAD4];

#include "attention/unfused/one_cache.glsl"
#include "attention/unfused/rows_seen.glsl"

void main() {
    const uint tid = gl_LocalInvocationID.x, row = gl_WorkGroupID.y * WG_SIZE + tid;
    const uint head0 = gl_WorkGroupID.x * HEADS, token0 = gl_WorkGroupID.z * TOKENS;
    const uint kv = head0 / (p.n_head / p.n_head_kv);
    for (uint i = tid; i < QUERIES * HEAD4; i += WG_SIZE) {
        const uint query = i / HEAD4, token = min(token0 + query / HEADS, p.n - 1u);
        query4[i] = q4[(token * p.n_head + head0 + query % HEADS) * HEAD4 + i % HEAD4];
    }
    barrier();
    if (row >= p.rows) return;
    bool seen[TOKENS];
    bool any_sees = false;
    [[unroll]] for (uint t = 0; t < TOKENS; t++) {
        const uvec2 range = token0 + t < p.n ? rows_seen(token0 + t) : uvec2(0u);
        seen[t] = row >= range.x && row < range.y;
        any_sees = any_sees || seen[t];
    }
    float sum[QUERIES];
    [[unroll]] for (uint i = 0; i < QUERIES; i++) sum[i] = 0.0;
    if (any_sees) {
        find_sequence(token0);
        const uint at = (kv * p.n_ctx + row_in_cache(row)) * PITCH;
        for (uint c = 0; c < HD / 8; c++) {
            const RAW8 raw = fetch_k8(at + c);
            const vec4 low = decode_low(raw, CACHE_TYPE), high = decode_high(raw, CACHE_TYPE);
            [[unroll]] for (uint i = 0; i < QUERIES; i++)
                sum[i] += dot(low, query4[i * HEAD4 + 2u * c]) + dot(high, query4[i * HEAD4 + 2u * c + 1u]);
        }
    }
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        const uint token = token0 + i / HEADS;
        if (token < p.n) kq[((head0 + i % HEADS) * p.n + token) * p.rows + row] = seen[i / HEADS] ? sum[i] : 0.0;
    }
}

#version 450
// MUL_MAT_KQV: attention's sum of values as a node of its own, all arithmetic in F32.
//
//   kqv[h, t, :] = sum over rows r that token t sees of w[h, t, r] * v[kv head of h, r, :]
//
// Bindings:
//   0  w        F32 [n_head, n, rows]: the softmax
//   1  cache_v  F16, F32, Q8_0 or Q4_0 (CACHE_TYPE) [n_head_kv, n_ctx, 8 PITCH], of which a row's first VD values count
//   2  pos      I32 [n], -1: padding, which gives zeros; with SPANS I32 [n, 2]: the first and the last row that a token sees
//   3  kqv      F32 [n_head, n, VD]
//   BIND_SLOTS, BIND_PAGES  (PAGE): the sequence of each token, the page table (attention/unfused/rows_seen.glsl)
//
// Workgroup (x, y) takes heads x * HEADS .. of one kv head and tokens y * TOKENS ..: each row of V is read once for HEADS * TOKENS queries.
// COLS threads share a row; STREAMS rows are read at once, row r by stream r % STREAMS whatever rows the tokens see, so that a sum
// does not depend on the other tokens. The streams meet in shared memory.
//
// Defines: VD CACHE_TYPE PITCH HEADS TOKENS WG_SIZE SPANS [PAGE BIND_SLOTS BIND_PAGES]

#define QUERIES (HEADS * TOKENS)
#define COLS (VD / 8)
#define STREAMS (WG_SIZE / COLS)

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

layout(binding = 0) readonly buffer W { float w[]; };
layout(binding = 1) readonly buffer Cache { uvec4 k4[]; };
layout(binding = 1) readonly buffer CachePairs { uvec2 k2[]; };
layout(binding = 1) readonly buffer CacheWords { uint k1[]; };
layout(binding = 2) readonly buffer Pos { int pos[]; };
layout(binding = 3) writeonly buffer Y { float kqv[]; };

shared vec4 of_streams[2 * STREAMS * COLS];

#include "attention/unfused/one_cache.glsl"
#include "attention/unfused/rows_seen.glsl"

void main() {
    const uint tid = gl_LocalInvocationID.x, stream = tid / COLS, col = tid % COLS;
    const uint head0 = gl_WorkGroupID.x * HEADS, token0 = gl_WorkGroupID.y * TOKENS;
    const uint kv = head0 / (p.n_head / p.n_head_kv);
    uvec2 range[TOKENS];
    uint lo = p.rows, hi = 0u;
    [[unroll]] for (uint t = 0; t < TOKENS; t++) {
        range[t] = token0 + t < p.n ? rows_seen(token0 + t) : uvec2(0u);
        if (range[t].x < range[t].y) lo = min(lo, range[t].x);
        hi = max(hi, range[t].y);
    }
    vec4 low_sum[QUERIES], high_sum[QUERIES];
    [[unroll]] for (uint i = 0; i < QUERIES; i++) low_sum[i] = high_sum[i] = vec4(0.0);
    if (stream < STREAMS) {
        find_sequence(token0);
        for (uint r = lo / STREAMS * STREAMS + stream; r < hi; r += STREAMS) {
            if (r < lo) continue;
            const RAW8 raw = fetch_k8((kv * p.n_ctx + row_in_cache(r)) * PITCH + col);
            const vec4 low = decode_low(raw, CACHE_TYPE), high = decode_high(raw, CACHE_TYPE);
            [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                if (r >= range[i / HEADS].x && r < range[i / HEADS].y) {
                    const float weight = w[((head0 + i % HEADS) * p.n + token0 + i / HEADS) * p.rows + r];
                    low_sum[i] += weight * low;
                    high_sum[i] += weight * high;
                }
            }
        }
    }
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        if (stream < STREAMS) {
            of_streams[2u * tid] = low_sum[i];
            of_streams[2u * tid + 1u] = high_sum[i];
        }
        barrier();
        const uint token = token0 + i / HEADS;
        for (uint d = tid; d < VD && token < p.n; d += WG_SIZE) {
            float sum = 0.0;
            for (uint s = 0; s < STREAMS; s++) sum += of_streams[s * 2u * COLS + d / 4u][d % 4u];
            kqv[((head0 + i % HEADS) * p.n + token) * VD + d] = sum;
        }
        barrier();
    }
}

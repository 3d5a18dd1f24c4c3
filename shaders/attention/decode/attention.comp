#version 450
// Attention over a KV cache with online softmax, all arithmetic in F32 (FLASH_ATTN_EXT).
// With FUSED also the norm, RoPE and cache store that come before it (ATTN_DECODE); without STORES_ROW the caches hold row pos already.
//
//   out[t, h, :] = sum over rows r of softmax_r(cap(scale * q[t, h, :] . k[r, :])) * v[r, :],   r = max(0, pos[t] + 1 - window) .. pos[t],
//   or those of the token's chunk (attention/window.glsl)
//
// cap(x) is softcap * tanh(x / softcap) with HAS_SOFTCAP, else x (attention/softcap.glsl).
//
// Bindings:
//   0  q        F32 [n, n_head, HD], read as vec4; with FUSED the packed q, k and v heads of one token, F32 [n_head + 2 n_head_kv, HD], or the q
//               heads alone (STORES_ROW 0)
//   1  cache_k  F16, F32, Q8_0 or Q4_0 (K_TYPE) [n_head_kv, n_ctx, HD], read eight values at a time (attention/cache_rows.glsl).
//               With STORES_ROW, row pos is written first
//   2  cache_v  the same (V_TYPE), VD values to a row. Rows are 8 V_PITCH values apart: more than VD where V is the first part of K's rows
//               (MLA)
//   3  pos      I32 [n]; -1: padding, whose output is zero and which stores nothing. With SPANS I32 [n, 2]: the first and the last row that a
//               token sees
//   4  y        F32 [n, n_head * VD], Q8_1 rows (OUT_Q8_1) as in docs/weight_layout.md, or F16 in unit order (OUT_UNITS; gemm/units.glsl)
//   5  partial  scratch of the splits: for each (token tile, head group, split) QUERIES * VD / 4 vec4 of sums,
//               then QUERIES vec2 (max, sum of weights)
//   6  tickets  one counter for each (token tile, head group)
//   BIND_Q_PE   q_pe F32 [n, n_head, HD - NOPE] (SPLIT_Q): the rest of Q; q then has its first NOPE values, in rows of Q_PITCH
//   BIND_SINKS  sinks F32 [n_head] (HAS_SINKS): an extra logit in the softmax of each head, without a row of V
//   BIND_GATE   gate F32 [n, n_head * VD] (with FUSED): y is multiplied by its sigmoid
//   BIND_SLOTS  slots I32 [n] (PAGE): the sequence of each token; BIND_PAGES  pages I32 [n_slots, max_pages]: the page table
//               (attention/pages.glsl). TOKENS is 1 then, pos counts rows of the token's sequence, n_ctx those of all pages together
//
// Workgroup (x, y, z) takes heads x * HEADS .. + HEADS of one kv head, tokens z * TOKENS .. + TOKENS, and split y of the rows. All its
// QUERIES = HEADS * TOKENS queries use every row of K and V that it reads (grouped-query attention). It walks the rows in chunks of ROWS:
//   scores   LANES threads together read a row of K
//   values   COLS = VD / 8 threads together read a row of V; each accumulates 8 columns for every query. A workgroup has STREAMS such groups of
//            threads (row streams), whose sums are merged at the end: by shuffles within a subgroup, then through shared memory
// USE_SHUFFLES 1: HD = VD and LANES = COLS, so the same threads read a row of K and the row of V;
//             scores and queries stay in registers (attention/decode/walk_lanes.glsl)
// USE_SHUFFLES 0: scores pass between threads through shared memory (attention/decode/walk_shared.glsl)
// In barrier-free stages the first chunk is loaded ahead of the wait for this step's rows if it has none of them.
// K and V of the next chunk are prefetched into registers (software prefetch). Logits are in base 2: scale includes log2 e.
//
// Split KV: if there are more than rows_per_split rows, they are cut into up to SPLITS splits of equal size, and one workgroup combines them in
// order (attention/decode/splits.glsl). The splits depend on pos alone, so a result has the same bits whatever the order of arrival and the other
// tokens.
//
// Defines: HD VD V_PITCH K_TYPE V_TYPE SPLIT_Q [NOPE Q_PITCH] HEADS TOKENS WG_SIZE STEPS LANES USE_SHUFFLES SPLITS READERS MERGE_QUERIES
// HAS_SINKS HAS_SOFTCAP SPANS OUT_Q8_1 OUT_UNITS [Y_STRIDE; those of gemm/units.glsl] FUSED [with HD = VD: STORES_ROW (1) HAS_NORM NORM_ALL NORM_V HEAD_LANES
// ROPE_PAIRS ROPE_NEOX] [PAGE BIND_SLOTS BIND_PAGES]; those of common/reduce.glsl

#define QUERIES (HEADS * TOKENS)
#define K_COLS (HD / 8)
#define COLS (VD / 8)
#define STREAMS (WG_SIZE / COLS)
#define ROWS (STEPS * WG_SIZE / LANES)
#define K_PARTS (K_COLS / LANES)
#define V_STEPS ((ROWS + STREAMS - 1) / STREAMS)
#define HEAD4 (HD / 4)
#define OUT4 (VD / 4)
#define REDUCE_GROUPS 1
#ifndef STORES_ROW
#define STORES_ROW FUSED
#endif

#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

#if REDUCE_SUBGROUP && (COLS & (COLS - 1)) == 0 && SUBGROUP_SIZE > COLS && WG_SIZE >= SUBGROUP_SIZE
#define SUBGROUP_STREAMS (SUBGROUP_SIZE / COLS)
#else
#define SUBGROUP_STREAMS 1
#endif
// Row streams left in the workgroup after those of each subgroup have been merged.
#define MERGED_STREAMS (STREAMS / SUBGROUP_STREAMS)

#include "common/clock.glsl"
#include "common/sentinel.glsl"
#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint n_head_kv;
    uint n_ctx;
    uint window;            // 0: none; of chunks: attention/window.glsl
    uint rows_per_split;
    float scale;            // includes log2 e
    float eps;
    float softcap;          // includes log2 e; read where HAS_SOFTCAP
#ifdef PAGE
    uint max_pages;
#endif
} p;

layout(binding = 0) SYNC_INPUT buffer Q { vec4 q4[]; };
#if FUSED
layout(binding = 0) SYNC_INPUT buffer Qkv { vec2 qkv2[]; };
#endif
#if STORES_ROW
#define CACHE_ACCESS
#else
#define CACHE_ACCESS readonly
#endif
layout(binding = 1) CACHE_ACCESS buffer CacheK { uvec4 k4[]; };
layout(binding = 1) CACHE_ACCESS buffer CacheKPairs { uvec2 k2[]; };
layout(binding = 1) CACHE_ACCESS buffer CacheKWords { uint k1[]; };
layout(binding = 2) CACHE_ACCESS buffer CacheV { uvec4 v4[]; };
layout(binding = 2) CACHE_ACCESS buffer CacheVPairs { uvec2 v2[]; };
layout(binding = 2) CACHE_ACCESS buffer CacheVWords { uint v1[]; };
layout(binding = 3) readonly buffer Pos { int pos[]; };
#if OUT_Q8_1
layout(binding = 4) writeonly buffer Y { uint y_words[]; };
#elif OUT_UNITS
layout(binding = 4) writeonly buffer Y { uvec2 y2[]; };
#if FK / ROW_LANES < 4
#extension GL_EXT_shader_16bit_storage : require
layout(binding = 4) writeonly buffer YHalves { uint16_t y_halves[]; };
#endif
#else
layout(binding = 4) writeonly buffer Y { vec4 y4[]; };
#endif
#if SPLITS > 1
#if SPINS
#define SPLIT_ACCESS coherent volatile
#else
#define SPLIT_ACCESS coherent
#endif
layout(binding = 5) SPLIT_ACCESS buffer Partial { vec4 partial4[]; };
layout(binding = 5) SPLIT_ACCESS buffer Partial2 { vec2 partial2[]; };
layout(binding = 6) coherent buffer Tickets { uint tickets[]; };
#endif
#if HAS_SINKS
layout(binding = BIND_SINKS) readonly buffer Sinks { float sinks[]; };
#endif
#ifdef BIND_GATE
layout(binding = BIND_GATE) SYNC_INPUT buffer Gate { vec4 gate4[]; };
#endif

#if SPLIT_Q
layout(binding = BIND_Q_PE) readonly buffer QPe { vec4 q_pe4[]; };

vec4 query_quad(uint row, uint i) {
    return i < NOPE / 4 ? q4[row * (Q_PITCH / 4) + i] : q_pe4[row * (HEAD4 - NOPE / 4) + i - NOPE / 4];
}
#elif !FUSED
vec4 query_quad(uint row, uint i) { return q4[row * HEAD4 + i]; }
#endif

const float LOG2_E = 1.44269504;
const float MASKED = -3.0e38;

shared vec4 query4[QUERIES * (HD > VD ? HEAD4 : OUT4)];  // the queries; at the end, the results
shared vec4 stream_sum[MERGED_STREAMS * MERGE_QUERIES * OUT4];
shared vec2 stream_max_sum[MERGED_STREAMS * QUERIES];  // (maximum, sum of weights)

// Merges `parts` partial results of query i, which lie `stride` vec4 of stream_sum apart. Returns vec4 o of the sum; max_sum:
// (maximum, sum of weights).
vec4 merge_partials(uint parts, uint stride, uint i, uint o, out vec2 max_sum) {
    max_sum = vec2(MASKED, 0.0);
    for (uint b = 0; b < parts; b++) max_sum.x = max(max_sum.x, stream_max_sum[b * QUERIES + i].x);
    vec4 total = vec4(0.0);
    for (uint b = 0; b < parts; b++) {
        const vec2 w = stream_max_sum[b * QUERIES + i];
        const float e = exp2(w.x - max_sum.x);
        max_sum.y += e * w.y;
        total += e * stream_sum[b * stride + o];
    }
    return total;
}

#define K_PITCH K_COLS
#include "attention/cache_rows.glsl"
#include "attention/decode/store.glsl"
#if SPLITS > 1
#include "attention/decode/splits.glsl"
#endif
#if FUSED
#include "attention/decode/fused.glsl"
#endif

// Rows that this workgroup walks, and rows that each of its tokens sees.
uint lo, hi;
#ifdef PAGE
#include "attention/pages.glsl"
#else
#define find_pages(base)
#define physical(row) (row)
#endif
uint row_first[TOKENS], row_end[TOKENS];

RAW8 k_now[STEPS][K_PARTS];
RAW8 v_now[V_STEPS];

// Past the end the last row is read again; its scores are masked.
uint last_row() { return max(hi, 1u) - 1u; }

// The eight values that a thread reads of the chunk at `base` where COLS threads read a row: neighbouring threads read neighbouring memory.
uint row_at(uint kv, uint base, uint s, uint tid) {
#if V_PITCH == COLS && !defined(PAGE)
    return min((kv * p.n_ctx + base + s * STREAMS) * COLS + tid, (kv * p.n_ctx + last_row()) * COLS + tid % COLS);
#else
    return (kv * p.n_ctx + physical(min(base + s * STREAMS + tid / COLS, last_row()))) * V_PITCH + tid % COLS;
#endif
}

void load_k(uint kv, uint base, uint tid) {
#if USE_SHUFFLES
    [[unroll]] for (uint s = 0; s < STEPS; s++) k_now[s][0] = fetch_k8(row_at(kv, base, s, tid));
#else
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const uint row = physical(min(base + s * (WG_SIZE / LANES) + tid / LANES, last_row()));
        [[unroll]] for (uint j = 0; j < K_PARTS; j++) k_now[s][j] = fetch_k8((kv * p.n_ctx + row) * K_COLS + j * LANES + tid % LANES);
    }
#endif
}

void load_v(uint kv, uint base, uint tid) {
    [[unroll]] for (uint s = 0; s < V_STEPS; s++) v_now[s] = fetch_v8(row_at(kv, base, s, tid));
}

// Reductions over the row streams of a subgroup.
#if SUBGROUP_STREAMS > 1
#define REDUCE_STREAMS(COMBINE) LANE_BUTTERFLY(v, COMBINE, COLS, SUBGROUP_SIZE)
#else
#define REDUCE_STREAMS(COMBINE)
#endif
float reduce_streams_max(float v) { REDUCE_STREAMS(max) return v; }
float reduce_streams_sum(float v) { REDUCE_STREAMS(BUTTERFLY_ADD) return v; }
vec4 reduce_streams_sum(vec4 v) { REDUCE_STREAMS(BUTTERFLY_ADD) return v; }

#include "attention/softcap.glsl"
#include "attention/window.glsl"
#include "attention/weight.glsl"
#if USE_SHUFFLES
#include "attention/decode/walk_lanes.glsl"
#else
#include "attention/decode/walk_shared.glsl"
#endif

void main() {
    MARK(MARK_BEGIN);
    const uint tid = gl_LocalInvocationID.x;
    const uint head0 = gl_WorkGroupID.x * HEADS;
    const uint kv = head0 / (p.n_head / p.n_head_kv);
    const uint token0 = gl_WorkGroupID.z * TOKENS;
    const uint split = gl_WorkGroupID.y;
#if FUSED
    prefetch_heads(tid, head0, kv);  // issue these loads before those of K and V: if the heads have arrived, they need not queue
#endif

    lo = p.n_ctx;
    hi = 0;
#ifdef PAGE
    page_table = uint(slots[min(token0, p.n - 1u)]) * p.max_pages;
#endif
    [[unroll]] for (uint t = 0; t < TOKENS; t++) {
#if SPANS
        const ivec2 span = token0 + t < p.n ? ivec2(pos[2 * (token0 + t)], pos[2 * (token0 + t) + 1]) : ivec2(0, -1);
        row_end[t] = min(uint(span.y + 1), p.n_ctx);
        row_first[t] = uint(span.x);
#else
        const int at = token0 + t < p.n ? pos[token0 + t] : -1;
        row_end[t] = min(uint(at + 1), p.n_ctx);
        row_first[t] = row_end[t] > 0 ? first_row(row_end[t], p.window) : 0;
#endif
        if (row_end[t] > 0) lo = min(lo, row_first[t]);
        hi = max(hi, row_end[t]);
    }
    if (hi == 0) {
        wait_for_arrivals();
        for (uint i = tid; i < QUERIES * OUT4; i += WG_SIZE) query4[i] = vec4(0.0);
        barrier();
        if (split == 0) {
            store(tid, token0, head0);
            arrive();
        }
        return;
    }
    const uint rows = hi - lo;
    const uint wanted = min(SPLITS, (rows + p.rows_per_split - 1) / p.rows_per_split);
    const uint length = (rows + wanted - 1) / wanted;
    const uint used = (rows + length - 1) / length;
    // A workgroup without rows waits, too: while it holds its multiprocessor, the next stage's workgroups cannot crowd on it.
    if (split >= used) {
        wait_for_arrivals();
        return;
    }
    lo += split * length;
    hi = min(lo + length, hi);
#ifdef BIND_EXPECTED
    // Rows of the cache that earlier steps stored need no wait.
    uint first_new = p.n_ctx;
    for (uint t = 0; t < p.n; t++)
#ifdef PAGE
        if (slots[t] == slots[token0])
#endif
#if SPANS
        first_new = 0;  // all rows are of this step
#else
        first_new = min(first_new, uint(pos[t]));  // of padding it is 2^32 - 1
#endif
    const bool loaded = lo + ROWS <= first_new;
    find_pages(lo);
    if (loaded) {
        load_k(kv, lo, tid);
        load_v(kv, lo, tid);
    }
#endif
    // `zero` is 0, but the compiler cannot know it before the wait is over.
    // Added to the addresses of Q, K and V, it keeps their loads behind the wait.
    const uint zero = wait_for_arrivals();
    lo += zero;
#if STORES_ROW
    owns_new = split == used - 1 && uint(pos[0]) < p.n_ctx;
    if (owns_new) hi--;
#endif

#ifdef BIND_EXPECTED
    if (!loaded)
#else
    find_pages(lo);
#endif
    {
        load_k(kv, lo, tid);
        load_v(kv, lo, tid);
    }
#if FUSED
  #if SPINS
    SPIN_ON(read_heads(tid, head0, kv), heads_arrived())
  #endif
    MARK(MARK_INPUTS);
    prepare(tid, head0, kv);
#else
    for (uint i = tid; i < QUERIES * HEAD4; i += WG_SIZE) {
        const uint token = token0 + i / (HEADS * HEAD4);
        query4[i] = token < p.n ? p.scale * query_quad(token * p.n_head + head0 + i / HEAD4 % HEADS + zero, i % HEAD4) : vec4(0.0);
    }
#endif
    barrier();

    walk_begin(tid);
    for (uint base = lo; base < hi; base += ROWS) {
        find_pages(base + ROWS);
        walk(kv, base, tid);
    }
    walk_end(tid);
    MARK(MARK_DONE);

    // Merge the workgroup's row streams, MERGE_QUERIES queries at a time.
    const uint stream = tid / (COLS * SUBGROUP_STREAMS);
    const bool leads = tid % (COLS * SUBGROUP_STREAMS) < COLS && stream < MERGED_STREAMS;
#if SPLITS > 1
    const uint tile = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
#endif
    [[unroll]] for (uint first = 0; first < QUERIES; first += MERGE_QUERIES) {
        if (first > 0) barrier();
        if (leads)
            [[unroll]] for (uint i = 0; i < MERGE_QUERIES; i++)
                [[unroll]] for (uint j = 0; j < 2; j++)
                    stream_sum[(stream * MERGE_QUERIES + i) * OUT4 + 2 * (tid % COLS) + j] = sum[first + i][j];
        barrier();
        for (uint o = tid; o < MERGE_QUERIES * OUT4; o += WG_SIZE) {
            const uint i = first + o / OUT4;
            vec2 max_sum;
            const vec4 total = merge_partials(MERGED_STREAMS, MERGE_QUERIES * OUT4, i, o, max_sum);
#if SPLITS > 1
            if (used > 1) {
                store_partial(tile, split, used, i, first * OUT4 + o, total, max_sum);
                continue;
            }
#endif
            query4[first * OUT4 + o] = normalize_sum(total, max_sum, head0 + i % HEADS);
        }
    }

#if SPLITS > 1
    if (used > 1) {
        if (!is_combiner(tile, split, used)) {
            MARK(MARK_END);
            return;
        }
        combine(tid, tile, used, head0);
    }
#endif
    barrier();
    store(tid, token0, head0);
    arrive();
    MARK(MARK_END);
}

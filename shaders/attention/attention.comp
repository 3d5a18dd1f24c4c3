#version 450
// Attention over an F16 cache with online softmax in F32 (FLASH_ATTN_EXT), and with FUSED the norm, RoPE and cache store before it
// (ATTN_DECODE).
//
// out[t, h, :] = sum over rows r of softmax_r(scale * q[t, h, :] . k[r, :]) * v[r, :],   r = max(0, pos[t] + 1 - window) .. pos[t]
//
//   q        F32 [n, n_head, HD], read as vec4; with FUSED one token of packed q, k and v heads, F32 [n_head + 2 n_head_kv, HD]
//   cache_k  F16 [n_head_kv, n_ctx, HD], read as uvec4 (8 values); cache_v the same. With FUSED row pos is written first
//   pos      I32 [n]; -1: padding, its output is zero and nothing is stored
//   y        F32 [n, n_head * HD], or Q8_1 rows (OUT_Q8_1) as in docs/architecture.md
//   partial  scratch of the splits: for each (token tile, head group, split) QUERIES * HD / 4 vec4 of sums, then QUERIES vec2 (max, sum of weights)
//   tickets  one counter for each (token tile, head group), see common/ticket.glsl
//   sinks    F32 [n_head]: a logit that takes part in the softmax and has no value
//
// Workgroup (x, y, z): heads x * HEADS .. + HEADS of one kv head, share y of the rows, tokens z * TOKENS .. + TOKENS. Its QUERIES = HEADS * TOKENS
// queries share every read of K and V. The rows go by in chunks of ROWS:
//   scores   LANES threads share a row of K; the sums go to shared memory
//   values   COLS = HD / 8 threads share a row of V and keep 8 values each of every query's sum; the STREAMS row streams of the
//            workgroup have each their own maximum and meet only at the end
// K and V of the next chunk are on their way while the present one is worked on. All logits are in powers of two (scale holds log2 e).
//
// Where the rows exceed rows_per_split they are cut into up to SPLITS shares of equal size; the last workgroup to arrive adds the shares
// up in their order. Which shares exist depends on pos alone, so neither the order of arrival nor the other tokens change a bit.
//
// Defines: HD HEADS TOKENS WG_SIZE STEPS LANES SPLITS ROUND OUT_Q8_1 FUSED HAS_SINKS, FUSED: HAS_NORM HEAD_LANES ROPE_PAIRS ROPE_NEOX, those of
// common/reduce.glsl

#define QUERIES (HEADS * TOKENS)
#define COLS (HD / 8)
#define STREAMS (WG_SIZE / COLS)
#define ROWS (STEPS * WG_SIZE / LANES)
#define K_PARTS (COLS / LANES)
#define V_STEPS ((ROWS + STREAMS - 1) / STREAMS)
#define OUT4 (HD / 4)
#define REDUCE_GROUPS 1

#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

#include "common/handover.glsl"

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint n_head_kv;
    uint n_ctx;
    uint window;            // 0: none
    uint rows_per_split;
    float scale;            // times log2 e
    float eps;
} p;

layout(binding = 0) HANDED buffer Q { vec4 q4[]; };
#if FUSED
layout(binding = 0) HANDED buffer Qkv { vec2 qkv2[]; };
layout(binding = 1) buffer CacheK { uvec4 k4[]; };
layout(binding = 2) buffer CacheV { uvec4 v4[]; };
#else
layout(binding = 1) readonly buffer CacheK { uvec4 k4[]; };
layout(binding = 2) readonly buffer CacheV { uvec4 v4[]; };
#endif
layout(binding = 3) readonly buffer Pos { int pos[]; };
#if OUT_Q8_1
layout(binding = 4) writeonly buffer Y { uint y_words[]; };
#else
layout(binding = 4) writeonly buffer Y { vec4 y4[]; };
#endif
#if SPLITS > 1
layout(binding = 5) coherent buffer Partial { vec4 partial4[]; };
layout(binding = 5) coherent buffer Partial2 { vec2 partial2[]; };
layout(binding = 6) coherent buffer Tickets { uint tickets[]; };
#include "common/ticket.glsl"
#endif
#if HAS_SINKS
layout(binding = BIND_SINKS) readonly buffer Sinks { float sinks[]; };
#endif

const float LOG2_E = 1.44269504;
const float MASKED = -3.0e38;

shared vec4 query4[QUERIES * OUT4];             // queries, and in the end what is stored
shared float scores[2][ROWS * QUERIES];         // two chunks in turn: one barrier a chunk is enough
shared vec4 stream_sum[STREAMS * ROUND * OUT4];
shared vec2 stream_weight[STREAMS * QUERIES];   // maximum, sum of weights

#include "attention/store.glsl"
#if FUSED
#include "attention/fused.glsl"
#endif

// Rows of this workgroup, and what they look like to each of its tokens.
uint lo, hi;
uint row_first[TOKENS], row_end[TOKENS];

uvec4 k_now[STEPS][K_PARTS];
uvec4 v_now[V_STEPS];

void load_k(uint kv, uint base, uint tid) {
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const uint row = base + s * (WG_SIZE / LANES) + tid / LANES;
        [[unroll]] for (uint j = 0; j < K_PARTS; j++) {
            k_now[s][j] = uvec4(0);
            if (row < hi) k_now[s][j] = k4[(kv * p.n_ctx + row) * COLS + j * LANES + tid % LANES];
        }
    }
}

void load_v(uint kv, uint base, uint tid) {
    [[unroll]] for (uint s = 0; s < V_STEPS; s++) {
        const uint r = s * STREAMS + tid / COLS;
        v_now[s] = uvec4(0);
        if (r < ROWS && base + r < hi && tid < STREAMS * COLS) v_now[s] = v4[(kv * p.n_ctx + base + r) * COLS + tid % COLS];
    }
}

// Row pos of the cache is being written while the fused kernel reads; its owner takes it from shared memory.
uvec4 key(uint s, uint j, uint base, uint tid) {
#if FUSED
    if (base + s * (WG_SIZE / LANES) + tid / LANES == new_row) return new_k[j * LANES + tid % LANES];
#endif
    return k_now[s][j];
}

uvec4 value(uint s, uint base, uint tid) {
#if FUSED
    if (base + s * STREAMS + tid / COLS == new_row) return new_v[tid % COLS];
#endif
    return v_now[s];
}

void add_scores(uint base, uint turn, uint tid) {
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const uint r = s * (WG_SIZE / LANES) + tid / LANES;
        float sum[QUERIES];
        [[unroll]] for (uint i = 0; i < QUERIES; i++) sum[i] = 0.0;
        [[unroll]] for (uint j = 0; j < K_PARTS; j++) {
            const uint part = j * LANES + tid % LANES;
            const uvec4 w = key(s, j, base, tid);
            const vec4 a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y)), b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
            [[unroll]] for (uint i = 0; i < QUERIES; i++) sum[i] += dot(a, query4[i * OUT4 + 2 * part]) + dot(b, query4[i * OUT4 + 2 * part + 1]);
        }
        [[unroll]] for (uint i = 0; i < QUERIES; i++) {
            const float score = group_sum(sum[i], LANES);
            const uint row = base + r;
            if (tid % LANES == i % LANES)
                scores[turn][r * QUERIES + i] = row < row_end[i / HEADS] && row >= row_first[i / HEADS] && row < hi ? score : MASKED;
        }
    }
}

void main() {
    const uint tid = gl_LocalInvocationID.x;
    const uint head0 = gl_WorkGroupID.x * HEADS;
    const uint kv = head0 / (p.n_head / p.n_head_kv);
    const uint token0 = gl_WorkGroupID.z * TOKENS;
    const uint split = gl_WorkGroupID.y;
#if FUSED && !AWAITS
    fetch_heads(tid, head0, kv);
#endif

    lo = p.n_ctx;
    hi = 0;
    [[unroll]] for (uint t = 0; t < TOKENS; t++) {
        const int at = token0 + t < p.n ? pos[token0 + t] : -1;
        row_end[t] = min(uint(at + 1), p.n_ctx);
        row_first[t] = p.window > 0 && row_end[t] > p.window ? row_end[t] - p.window : 0;
        if (row_end[t] > 0) lo = min(lo, row_first[t]);
        hi = max(hi, row_end[t]);
    }
    if (hi == 0) {
        for (uint i = tid; i < QUERIES * OUT4; i += WG_SIZE) query4[i] = vec4(0.0);
        barrier();
        if (split == 0) store(tid, token0, head0);
        return;
    }
    const uint rows = hi - lo;
    const uint wanted = min(SPLITS, (rows + p.rows_per_split - 1) / p.rows_per_split);
    const uint share = (rows + wanted - 1) / wanted;
    const uint used = (rows + share - 1) / share;
    if (split >= used) return;
    lo += split * share;
    hi = min(lo + share, hi);

    load_k(kv, lo, tid);
    load_v(kv, lo, tid);
#if FUSED
  #if AWAITS
    fetch_heads(tid, head0, kv);
  #endif
    prepare(tid, head0, kv, split == used - 1);
#else
    for (uint i = tid; i < QUERIES * OUT4; i += WG_SIZE) {
        const uint token = token0 + i / (HEADS * OUT4);
        query4[i] = token < p.n ? p.scale * q4[(token * p.n_head + head0) * OUT4 + i % (HEADS * OUT4)] : vec4(0.0);
    }
#endif
    barrier();

    float top[QUERIES], weight[QUERIES];
    vec4 sum[QUERIES][2];
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        top[i] = MASKED;
        weight[i] = 0.0;
        sum[i][0] = sum[i][1] = vec4(0.0);
    }
    uint turn = 0;
    for (uint base = lo; base < hi; base += ROWS) {
        add_scores(base, turn, tid);
        if (base + ROWS < hi) load_k(kv, base + ROWS, tid);
        barrier();
        [[unroll]] for (uint i = 0; i < QUERIES; i++) {
            float higher = top[i];
            [[unroll]] for (uint s = 0; s < V_STEPS; s++) {
                const uint r = s * STREAMS + tid / COLS;
                if (r < ROWS) higher = max(higher, scores[turn][r * QUERIES + i]);
            }
            const float shrink = exp2(top[i] - higher);
            top[i] = higher;
            weight[i] *= shrink;
            sum[i][0] *= shrink;
            sum[i][1] *= shrink;
        }
        [[unroll]] for (uint s = 0; s < V_STEPS; s++) {
            const uint r = s * STREAMS + tid / COLS;
            if (r < ROWS) {
                const uvec4 w = value(s, base, tid);
                const vec4 a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y)), b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
                [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                    const float score = scores[turn][r * QUERIES + i];
                    const float e = score > MASKED ? exp2(score - top[i]) : 0.0;
                    weight[i] += e;
                    sum[i][0] += e * a;
                    sum[i][1] += e * b;
                }
            }
        }
        if (base + ROWS < hi) load_v(kv, base + ROWS, tid);
        turn ^= 1;
    }

    // The streams of the workgroup meet, ROUND queries at a time.
    const uint stream = tid / COLS;
    if (tid % COLS == 0 && stream < STREAMS)
        [[unroll]] for (uint i = 0; i < QUERIES; i++) stream_weight[stream * QUERIES + i] = vec2(top[i], weight[i]);
#if SPLITS > 1
    const uint tile = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint part_stride4 = QUERIES * OUT4 + (QUERIES + 1) / 2;
    const uint part0 = tile * SPLITS * part_stride4;
#endif
    [[unroll]] for (uint first = 0; first < QUERIES; first += ROUND) {
        if (first > 0) barrier();
        if (stream < STREAMS)
            [[unroll]] for (uint i = 0; i < ROUND; i++) {
                stream_sum[(stream * ROUND + i) * OUT4 + 2 * (tid % COLS)] = sum[first + i][0];
                stream_sum[(stream * ROUND + i) * OUT4 + 2 * (tid % COLS) + 1] = sum[first + i][1];
            }
        barrier();
        for (uint o = tid; o < ROUND * OUT4; o += WG_SIZE) {
            const uint i = first + o / OUT4;
            float highest = MASKED, all = 0.0;
            for (uint s = 0; s < STREAMS; s++) highest = max(highest, stream_weight[s * QUERIES + i].x);
            vec4 total = vec4(0.0);
            for (uint s = 0; s < STREAMS; s++) {
                const vec2 w = stream_weight[s * QUERIES + i];
                const float e = exp2(w.x - highest);
                all += e * w.y;
                total += e * stream_sum[s * ROUND * OUT4 + o];
            }
#if SPLITS > 1
            if (used > 1) {
                partial4[part0 + split * part_stride4 + first * OUT4 + o] = total;
                if (o % OUT4 == 0) partial2[(part0 + split * part_stride4 + QUERIES * OUT4) * 2 + i] = vec2(highest, all);
                continue;
            }
#endif
            query4[first * OUT4 + o] = finished(total, highest, all, head0 + i % HEADS);
        }
    }

#if SPLITS > 1
    if (used > 1) {
        if (!last_to_arrive(tile, used)) return;
        for (uint o = tid; o < QUERIES * OUT4; o += WG_SIZE) {
            const uint i = o / OUT4;
            float highest = MASKED, all = 0.0;
            vec4 total = vec4(0.0);
            for (uint s0 = 0; s0 < used; s0 += 8) {
                vec2 w[8];
                vec4 v[8];
                [[unroll]] for (uint s = 0; s < 8; s++) {
                    const uint at = part0 + min(s0 + s, used - 1) * part_stride4;
                    w[s] = partial2[(at + QUERIES * OUT4) * 2 + i];
                    v[s] = partial4[at + o];
                }
                float higher = highest;
                [[unroll]] for (uint s = 0; s < 8; s++) higher = max(higher, w[s].x);
                const float shrink = exp2(highest - higher);
                highest = higher;
                all *= shrink;
                total *= shrink;
                [[unroll]] for (uint s = 0; s < 8; s++) {
                    const float e = s0 + s < used ? exp2(w[s].x - higher) : 0.0;
                    all += e * w[s].y;
                    total += e * v[s];
                }
            }
            query4[o] = finished(total, highest, all, head0 + i % HEADS);
        }
    }
#endif
    barrier();
    store(tid, token0, head0);
}

#version 450
// Attention of many tokens over a KV cache with online softmax, f32 throughout (FLASH_ATTN_EXT), for devices without cooperative matrices.
//
//   out[t, h, :] = sum over rows r of softmax_r(cap(scale * q[t, h, :] . k[r, :])) * v[r, :],   r = max(0, pos[t] + 1 - window) .. pos[t]
//
// cap(x) is softcap * tanh(x / softcap) with HAS_SOFTCAP, else x (attention/softcap.glsl).
// Bindings and tiles: attention/prompt/prompt_iface.glsl. A row of cache_v has VD values, and rows are 8 V_PITCH values apart: more than VD where V
// is the first slice of K's rows (MLA). SPLIT_Q: Q is in two tensors as in attention/decode/attention.comp, q_pe at binding 6.
//
// A workgroup takes a tile of TILE_Q queries and walks all rows that any of them sees, in blocks of ROWS. Blocks begin at multiples of ROWS, so
// that a token's bits do not depend on the other tokens of its tile. LANES neighbouring threads share a query: each holds quads (four values)
// part, part + LANES .. of it and of its weighted sum. A thread has QUERIES queries, SLOTS apart. It keeps their maxima and sums of weights
// itself, so the softmax needs no other thread.
//
//   USE_SHUFFLES 1  a workgroup is one subgroup and LANES is 1. The lanes share the loads of a row and broadcast its values by shuffles: on
//                   a CPU driver a load costs one instruction per lane, a shuffle one for all
//   USE_SHUFFLES 0  blocks of K and V pass through shared memory as f32; threads with the same part read the same address (a broadcast)
//
// Defines: HD VD V_PITCH K_TYPE V_TYPE SPLIT_Q [NOPE Q_PITCH] LANES QUERIES ROWS USE_SHUFFLES OUT_TYPE HAS_SINKS HAS_SOFTCAP SPANS;
// WG_SIZE and the others of common/reduce.glsl

#define QUADS (HD / 4 / LANES)        // quads of a query that a thread holds
#define V_QUADS (VD / 4 / LANES)      // and of its weighted sum
#define K_ROW_QUADS (HD / 4)
#define ROW_QUADS (VD / 4)
#define K_WORDS (HD / 8)
#define V_WORDS (VD / 8)
#define SLOTS (WG_SIZE / LANES)
#define TILE_Q (SLOTS * QUERIES)
#define ROWS_AT_ONCE (ROWS < 4 ? ROWS : 4)
#define REDUCE_GROUPS 1

#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

#include "attention/prompt/prompt_iface.glsl"
#define K_PITCH K_WORDS
#include "attention/cache_rows.glsl"

#if SPLIT_Q
layout(std430, set = 0, binding = 6) readonly buffer QPe { vec4 q_pe4[]; };

vec4 query_quad(uint row, uint i) {
    return i < NOPE / 4 ? q4[row * (Q_PITCH / 4) + i] : q_pe4[row * (K_ROW_QUADS - NOPE / 4) + i - NOPE / 4];
}
#else
vec4 query_quad(uint row, uint i) { return q4[row * K_ROW_QUADS + i]; }
#endif

#include "attention/softcap.glsl"
#include "attention/weight.glsl"

vec4 query[QUERIES][QUADS];
vec4 sum[QUERIES][V_QUADS];
float score[QUERIES][ROWS];
float score_max[QUERIES], weight_sum[QUERIES];
uvec2 visible[QUERIES];
uint lo, hi;  // rows that any query of the tile sees

#if USE_SHUFFLES
#define STAGE_QUADS (SLOTS * ROW_QUADS)
shared vec4 stage[STAGE_QUADS];

#define CHUNKS(words) (((words) + WG_SIZE - 1) / WG_SIZE)
vec4 k_row[ROWS][CHUNKS(K_WORDS)][2], v_row[ROWS][CHUNKS(V_WORDS)][2];

// Loads this lane's words of the block's rows. A row that no query sees counts as zeros in V, which may hold no numbers there: a weight of 0 does
// not take those out. In K scores are masked.
#define LOAD(LOADER, INTO, WORDS, PITCH, TYPE, KEPT)                                                                    \
    [[unroll]] for (uint r = 0; r < ROWS; r++)                                                                          \
        [[unroll]] for (uint c = 0; c < CHUNKS(WORDS); c++) {                                                           \
            const uint word = min(c * WG_SIZE + tid, uint(WORDS - 1));                                                  \
            const RAW8 words = LOADER((kv * p.n_ctx + min(base + r, hi - 1u)) * PITCH + word);                          \
            const RAW8 those = RAW8_IF(KEPT, words);                                                                    \
            INTO[r][c][0] = decode_low(those, TYPE);                                                                    \
            INTO[r][c][1] = decode_high(those, TYPE);                                                                   \
        }
void load_block(uint kv, uint base, uint tid) {
    uint mine = 0u, seen = 0u;  // rows that this lane's queries see, and all: a bit each
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        const uint row = base + r;
        [[unroll]] for (uint t = 0; t < QUERIES; t++) mine |= uint(row >= visible[t].x && row < visible[t].y) << r;
    }
    [[unroll]] for (uint lane = 0; lane < WG_SIZE; lane++) seen |= subgroupShuffle(mine, lane);
    LOAD(fetch_k8, k_row, K_WORDS, K_WORDS, K_TYPE, true)
    LOAD(fetch_v8, v_row, V_WORDS, V_PITCH, V_TYPE, (seen >> r & 1u) != 0u)
}
#define K_QUAD(r, j) subgroupShuffle(k_row[r][(j) / 2 / WG_SIZE][(j) % 2], (j) / 2 % WG_SIZE)
#define V_QUAD(r, j) subgroupShuffle(v_row[r][(j) / 2 / WG_SIZE][(j) % 2], (j) / 2 % WG_SIZE)
#else
#define K_BLOCK_QUADS (ROWS * K_ROW_QUADS)
#define BLOCK_QUADS (K_BLOCK_QUADS + ROWS * ROW_QUADS)
#define STAGE_QUADS (BLOCK_QUADS > SLOTS * ROW_QUADS ? BLOCK_QUADS : SLOTS * ROW_QUADS)
shared vec4 stage[STAGE_QUADS];  // a block of K, then one of V; at the end, the results to store

void load_block(uint kv, uint base, uint tid) {
    barrier();
    for (uint w = tid; w < ROWS * max(K_WORDS, V_WORDS); w += WG_SIZE) {
        if (w < ROWS * K_WORDS) {
            const uint row = base + w / K_WORDS;
            RAW8 k = RAW8_OF(uvec4(0u));
            if (row >= lo && row < hi) k = fetch_k8((kv * p.n_ctx + row) * K_WORDS + w % K_WORDS);
            stage[2u * w] = decode_low(k, K_TYPE);
            stage[2u * w + 1u] = decode_high(k, K_TYPE);
        }
        if (w < ROWS * V_WORDS) {
            const uint row = base + w / V_WORDS;
            RAW8 v = RAW8_OF(uvec4(0u));
            if (row >= lo && row < hi) v = fetch_v8((kv * p.n_ctx + row) * V_PITCH + w % V_WORDS);
            stage[K_BLOCK_QUADS + 2u * w] = decode_low(v, V_TYPE);
            stage[K_BLOCK_QUADS + 2u * w + 1u] = decode_high(v, V_TYPE);
        }
    }
    barrier();
}
#define K_QUAD(r, j) stage[(r) * K_ROW_QUADS + (j) * LANES + tid % LANES]
#define V_QUAD(r, j) stage[K_BLOCK_QUADS + (r) * ROW_QUADS + (j) * LANES + tid % LANES]
#endif

float reduce_lanes_sum(float v) {
#if LANES > 1
    return group_sum(v, LANES);
#else
    return v;
#endif
}

// Constant bounds: drivers unroll from the inside out, and stop at an inner loop whose bound an outer loop sets.
void make_scores(uint base, uint tid) {
    [[unroll]] for (uint part_of = 0; part_of < ROWS / ROWS_AT_ONCE; part_of++) {
        [[unroll]] for (uint t = 0; t < QUERIES; t++)
            [[unroll]] for (uint r = 0; r < ROWS_AT_ONCE; r++) score[t][part_of * ROWS_AT_ONCE + r] = 0.0;
        [[unroll]] for (uint j = 0; j < QUADS; j++)
            [[unroll]] for (uint r = 0; r < ROWS_AT_ONCE; r++) {
                const uint row = part_of * ROWS_AT_ONCE + r;
                const vec4 k = K_QUAD(row, j);
                [[unroll]] for (uint t = 0; t < QUERIES; t++)
                    score[t][row] = fma(query[t][j].w, k.w, fma(query[t][j].z, k.z, fma(query[t][j].y, k.y, fma(query[t][j].x, k.x, score[t][row]))));
            }
    }
    [[unroll]] for (uint t = 0; t < QUERIES; t++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            const float all_lanes = reduce_lanes_sum(score[t][r]);
            score[t][r] = base + r >= visible[t].x && base + r < visible[t].y ? capped(all_lanes) : MASKED;
        }
}

// Scores become weights, and the sums so far are rescaled to the new maximum (online softmax).
void make_weights() {
    [[unroll]] for (uint t = 0; t < QUERIES; t++) {
        float new_max = score_max[t];
        [[unroll]] for (uint r = 0; r < ROWS; r++) new_max = max(new_max, score[t][r]);
        const float rescale = exp2(score_max[t] - new_max);
        score_max[t] = new_max;
        weight_sum[t] *= rescale;
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            score[t][r] = weight_of(score[t][r], new_max);
            weight_sum[t] += score[t][r];
        }
        [[unroll]] for (uint j = 0; j < V_QUADS; j++) sum[t][j] *= rescale;
    }
}

void add_values(uint tid) {
    [[unroll]] for (uint part_of = 0; part_of < ROWS / ROWS_AT_ONCE; part_of++)
        [[unroll]] for (uint j = 0; j < V_QUADS; j++)
            [[unroll]] for (uint r = 0; r < ROWS_AT_ONCE; r++) {
                const uint row = part_of * ROWS_AT_ONCE + r;
                const vec4 v = V_QUAD(row, j);
                [[unroll]] for (uint t = 0; t < QUERIES; t++) sum[t][j] = fma(vec4(score[t][row]), v, sum[t][j]);
            }
}

#include "attention/prompt/prompt_store.glsl"

void main() {
    const uint tid = gl_LocalInvocationID.x, part = tid % LANES;
    const uint kv = kv_head(), query0 = first_query(TILE_Q);
    uint first = 0xffffffffu, end = 0u;
    [[unroll]] for (uint t = 0; t < QUERIES; t++) {
        const uint i = query0 + t * SLOTS + tid / LANES, token = min(token_of(i), p.n - 1u);
        visible[t] = visible_rows(i);
        if (visible[t].y > 0u) first = min(first, visible[t].x);
        end = max(end, visible[t].y);
        score_max[t] = MASKED;
        weight_sum[t] = 0.0;
        [[unroll]] for (uint j = 0; j < QUADS; j++) query[t][j] = p.scale * query_quad(token * p.n_head + head_of(i), j * LANES + part);
        [[unroll]] for (uint j = 0; j < V_QUADS; j++) sum[t][j] = vec4(0.0);
    }
    lo = ~wg_max(~first);
    hi = wg_max(end);

    for (uint base = lo / ROWS * ROWS; base < hi; base += ROWS) {
        load_block(kv, base, tid);
        make_scores(base, tid);
        make_weights();
        add_values(tid);
    }

    [[unroll]] for (uint t = 0; t < QUERIES; t++) {
        const float factor = normalizer(query0 + t * SLOTS + tid / LANES, score_max[t], weight_sum[t]);
        barrier();
        [[unroll]] for (uint j = 0; j < V_QUADS; j++) stage[tid / LANES * ROW_QUADS + j * LANES + part] = factor * sum[t][j];
        barrier();
        for (uint base = 0; base < SLOTS * ROW_QUADS; base += WG_SIZE) {
            const uint at = base + tid;
            const bool valid = at < SLOTS * ROW_QUADS;
            store_quad(query0 + t * SLOTS + at / ROW_QUADS, at % ROW_QUADS, valid, stage[valid ? at : 0u]);
        }
    }
}

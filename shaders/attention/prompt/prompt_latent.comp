#version 450
// Attention of many tokens by cooperative matrices for MLA (FLASH_ATTN_EXT), where one cache row serves as key and value: its first VD values
// are the row of V. Otherwise as attention/prompt/prompt_matrix.comp: f16 queries, rows and weights; f32 sums, maxima and exponentials.
//
// Bindings and queries: attention/prompt/prompt_iface.glsl; cache_v is cache_k. Rows are long (576 values for DeepSeek-V2), more than the registers of
// a subgroup can hold. So PARTS subgroups share FM queries; each holds a slice of the queries' values and makes a part of the output columns:
//   its slice of the scores  S [FM x ROWS] = Q [FM x WIDTH / PARTS] K^T; all PARTS add up the parts through shared memory, in one order
//   weights                  P = exp2(S - maximum); each subgroup computes them all, with the same result
//   its columns              O [FM x VD / PARTS] = O * exp2(old maximum - new maximum) + P V
// A block of ROWS rows lies in shared memory once, for K and V, while the next one is prefetched into registers.
//
//   binding 6  q_pe F32 [n, n_head, HD - NOPE] (SPLIT_Q): the rest of Q; q then has its first NOPE values, in rows of Q_PITCH.
//              Otherwise unused, any buffer
//   binding 7  overflow word: raised if a query does not fit into f16
//
// No defines; everything is a specialization constant. Needs ROW_LANES (gemm/matrix.glsl) and matrices with FN = FK. Results are F32.
#include "gemm/matrix.glsl"
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(constant_id = 5) const uint HD = 576;  // values of a row of K
layout(constant_id = 6) const uint VD = 512;  // values of a row of V, its first ones
layout(constant_id = 7) const uint ROWS = 16;  // rows of a block
layout(constant_id = 8) const uint PARTS = 4;  // subgroups that share the same queries
layout(constant_id = 9) const uint HAS_SINKS = 0;  // 1: binding 5 holds sinks
layout(constant_id = 10) const uint ROW_LANES = 4;  // lanes that share a row of a sum matrix
layout(constant_id = 11) const uint SPLIT_Q = 0;  // 1: Q is in two tensors
layout(constant_id = 12) const uint NOPE = 576;  // values of a head of Q in q
layout(constant_id = 13) const uint Q_PITCH = 576;  // values from row to row of q
layout(constant_id = 14) const uint K_TYPE = 0;  // CACHE_*
layout(constant_id = 15) const uint SPANS = 0;  // 1: binding 3 holds the rows that each token sees
const uint V_TYPE = K_TYPE;

#include "attention/prompt/prompt_iface.glsl"
#define K_PITCH (HD / 8)
#define V_PITCH (HD / 8)
#include "attention/cache_load.glsl"
layout(std430, set = 0, binding = 6) readonly buffer QPe { vec4 q_pe4[]; };
#define OVERFLOW_BINDING 7
#include "gemm/overflow.glsl"

const float LOWEST = -1.0e37;  // above MASKED: exp2(MASKED - maximum) is then 0 in a row that has not seen anything yet

const uint SUBGROUPS = WG / SG, MQ = 1;
const uint TILE_Q = SUBGROUPS / PARTS * FM;
const uint ELEMENTS = FM * FN / SG;                          // of a sum matrix, per lane
const uint NK = (HD + FK * PARTS - 1) / (FK * PARTS);        // matrices of a query that a subgroup holds
const uint NO = (VD + FN * PARTS - 1) / (FN * PARTS);        // and of its sum
const uint WIDTH = NK * PARTS * FK;
const uint PITCH = WIDTH / 8 + 1;                            // 16-byte words from row to row
const uint ROW_WORDS = HD / 8;
const uint NS = ROWS / FN, NP = ROWS / FK;                   // matrices of scores, of weights
const uint THREAD_WORDS = (ROWS * (WIDTH / 8) + WG - 1) / WG;
const uint MAXIMA_PITCH = FN / 4 + 1, SCORE_PITCH = ROWS / 4 + 1, STAGE_PITCH = FN / 4 + 1;
const uint SCORE_WORDS = FM * SCORE_PITCH;                   // the scores that one subgroup contributes
const uint BLOCK_WORDS = (ROWS > FM ? ROWS : FM) * PITCH, STAGE_WORDS = SUBGROUPS * FM * MAXIMA_PITCH;

shared uvec4 kv_rows[BLOCK_WORDS > STAGE_WORDS ? BLOCK_WORDS : STAGE_WORDS];
shared vec4 score_parts[SUBGROUPS * SCORE_WORDS];

MATRIX_A query[NK];
MATRIX_SUM sums[NO];
uvec4 words_now[THREAD_WORDS];

uint part() { return gl_SubgroupID % PARTS; }

// The first query row of a subgroup.
uint first_row_of(uint m) { return gl_SubgroupID / PARTS * FM; }

#include "attention/prompt/prompt_blocks.glsl"
#include "attention/prompt/softmax_registers.glsl"

void fetch(uint base) { FETCH(load_k8, words_now) }
void put() { PUT(words_now, 0u, K_TYPE) }

vec4 query_quad(uint row, uint i) {
    if (SPLIT_Q != 0 && i >= NOPE / 4) return q_pe4[row * (HD / 4 - NOPE / 4) + i - NOPE / 4];
    return q4[row * (Q_PITCH / 4) + i];
}

// Loads the queries as matrices, for one group of PARTS subgroups at a time.
void load_queries(uint query0) {
    [[unroll]] for (uint group = 0; group < SUBGROUPS / PARTS; group++) {
        barrier();
        for (uint at = gl_LocalInvocationIndex; at < FM * (WIDTH / 8); at += WG) {
            const uint row = at / (WIDTH / 8), word = at % (WIDTH / 8), i = query0 + group * FM + row;
            const uint head = min(token_of(i), p.n - 1u) * p.n_head + head_of(i), quad = 2u * min(word, ROW_WORDS - 1u);
            const float scale = word < ROW_WORDS ? p.scale : 0.0;
            const vec4 a = clamp(track_overflow(scale * query_quad(head, quad)), -65504.0, 65504.0);
            const vec4 b = clamp(track_overflow(scale * query_quad(head, quad + 1u)), -65504.0, 65504.0);
            kv_rows[row * PITCH + word] = uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
        }
        barrier();
        if (gl_SubgroupID / PARTS == group)
            [[unroll]] for (uint k = 0; k < NK; k++)
                coopMatLoad(query[k], kv_rows, (part() * NK + k) * (FK / 8), PITCH, gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
}

// Stores this subgroup's slice of a block's scores in shared memory.
void put_score_part() {
    MATRIX_SUM score[NS];
    [[unroll]] for (uint s = 0; s < NS; s++) score[s] = MATRIX_SUM(0.0);
    [[unroll]] for (uint k = 0; k < NK; k++)
        [[unroll]] for (uint s = 0; s < NS; s++) {
            MATRIX_B b;
            coopMatLoad(b, kv_rows, s * FN * PITCH + (part() * NK + k) * (FK / 8), PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            score[s] = coopMatMulAdd(query[k], b, score[s]);
        }
    [[unroll]] for (uint s = 0; s < NS; s++)
        coopMatStore(score[s], score_parts, gl_SubgroupID * SCORE_WORDS + s * (FN / 4), SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
}

// Loads the whole scores: the slices of all subgroups that share the queries, added in a fixed order.
void take_scores(out MATRIX_SUM score[NS]) {
    const uint first = gl_SubgroupID / PARTS * PARTS * SCORE_WORDS;
    [[unroll]] for (uint s = 0; s < NS; s++) {
        coopMatLoad(score[s], score_parts, first + s * (FN / 4), SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 1; i < PARTS; i++) {
            MATRIX_SUM more;
            coopMatLoad(more, score_parts, first + i * SCORE_WORDS + s * (FN / 4), SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            score[s] += more;
        }
    }
}

void store_results(uint query0) {
    const uint stage = gl_SubgroupID * FM * STAGE_PITCH;
    normalize_in_registers(0u, query0);
    [[unroll]] for (uint o = 0; o < NO; o++) {
        coopMatStore(sums[o], kv_rows, stage, STAGE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_sync();
        [[unroll]] for (uint base = 0; base < FM * (FN / 4); base += SG) {
            const uint at = base + gl_SubgroupInvocationID, row = at / (FN / 4), quad = (part() * NO + o) * (FN / 4) + at % (FN / 4);
            const uint i = query0 + first_row_of(0u) + row, token = token_of(i);
            if (row < FM && token < p.n && quad < VD / 4)
                y4[(token * p.n_head + head_of(i)) * (VD / 4) + quad] = uintBitsToFloat(kv_rows[stage + row * STAGE_PITCH + at % (FN / 4)]);
        }
        subgroup_sync();
    }
}

void main() {
    const uint query0 = first_query(TILE_Q);
    for (uint i = gl_LocalInvocationIndex; i < TILE_Q; i += WG) visible[i] = visible_rows(query0 + i);
    [[unroll]] for (uint i = 0; i < OWN_ROWS; i++) {
        own_max[i] = MASKED;
        own_sum[i] = 0.0;
    }
    find_element_positions(gl_SubgroupID * FM * MAXIMA_PITCH);
    barrier();
    const uvec2 every = find_range();
    [[unroll]] for (uint o = 0; o < NO; o++) sums[o] = MATRIX_SUM(0.0);
    load_queries(query0);

    if (hi > 0u) {
        uint base = lo / ROWS * ROWS;
        fetch(base);
        for (; base < hi; base += ROWS) {
            put();
            if (base + ROWS < hi) fetch(base + ROWS);
            barrier();
            put_score_part();
            barrier();
            MATRIX_SUM score[NS];
            take_scores(score);
            if (base < every.x || base + ROWS > every.y) mask_scores(first_row_of(0u), base, score);
            MATRIX_A p_matrix[NP];
            softmax_in_registers(0u, score, p_matrix);
            [[unroll]] for (uint k = 0; k < NP; k++)
                [[unroll]] for (uint o = 0; o < NO; o++) {
                    MATRIX_B b;
                    coopMatLoad(b, kv_rows, k * FK * PITCH + (part() * NO + o) * (FN / 8), PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    sums[o] = coopMatMulAdd(p_matrix[k], b, sums[o]);
                }
            barrier();
        }
    }
    store_results(query0);
    report_overflow();
}

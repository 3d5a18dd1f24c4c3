#version 450
// Attention of many tokens over a KV cache by cooperative matrices (FLASH_ATTN_EXT). Queries, keys, values and weights are f16; sums, maxima
// and exponentials f32. Blocks and online softmax as in FlashAttention-2.
//
// Bindings and queries: attention/prompt/prompt_iface.glsl. A workgroup takes a tile of TILE_Q queries, MQ * FM per subgroup, and walks all rows that
// any of them sees in blocks of ROWS, which begin at multiples of ROWS. A block of K and one of V lie in shared memory as f16, in rows padded
// against bank conflicts, while the next blocks are prefetched into registers. For each block a subgroup
//   makes scores      S [FM x ROWS] = Q [FM x HD] K^T; Q stays in registers throughout
//   makes weights     P = exp2(S - row maximum), as f16 matrices A
//   accumulates       O [FM x HD] = O * exp2(old maximum - new maximum) + P V
// The driver decides which elements of a matrix a lane holds. A matrix of position numbers, loaded at the start, tells row and column of each.
// If a check at start-up found a known layout (ROW_LANES), maxima and weights stay in registers; otherwise they pass through shared memory.
//
// Results as fragments (OUT_FRAGMENTS) pass through shared memory once more, sorted by head and token: FN tokens of a head are the columns of a
// matrix B. A tile then has whole groups of FN tokens: TILE_Q is a multiple of FN times the heads of a group.
//
// No defines; everything is a specialization constant. Heads are padded with zeros to whole matrices.
#include "gemm/matrix.glsl"
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(constant_id = 5) const uint HD = 128;  // values of a head
layout(constant_id = 6) const uint ROWS = 32;  // rows of a block
layout(constant_id = 7) const uint MQ = 1;        // matrices of query rows per subgroup
layout(constant_id = 8) const uint OUT_TYPE = 0;  // OUT_*
layout(constant_id = 9) const uint HAS_SINKS = 0;  // 1: binding 5 holds sinks
layout(constant_id = 10) const uint ROW_LANES = 0;  // lanes that share a row of a sum matrix; 0: unknown
layout(constant_id = 11) const uint K_TYPE = 0;     // CACHE_*
layout(constant_id = 12) const uint V_TYPE = 0;
layout(constant_id = 13) const uint HAS_SOFTCAP = 0;  // 1: scores have a softcap (attention/softcap.glsl)
layout(constant_id = 14) const uint SPANS = 0;      // 1: binding 3 holds the rows that each token sees

#include "attention/prompt/prompt_iface.glsl"
#include "attention/softcap.glsl"
#define K_PITCH (HD / 8)
#define V_PITCH (HD / 8)
#include "attention/cache_load.glsl"
#define OVERFLOW_BINDING 6  // raised if a query does not fit into f16
#include "gemm/overflow.glsl"

uint group_max(uint v, uint lanes) {
    v = max(v, subgroupShuffleXor(v, 1u));
    v = max(v, subgroupShuffleXor(v, 2u));
    return max(v, subgroupShuffleXor(v, 4u));
}
uint group_sum(uint v, uint lanes) {
    v += subgroupShuffleXor(v, 1u);
    v += subgroupShuffleXor(v, 2u);
    return v + subgroupShuffleXor(v, 4u);
}
const uint ROW_QUADS = HD / 4;
#include "attention/prompt/prompt_store.glsl"

#define MATRIX_WEIGHT coopmat<float16_t, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

const float LOWEST = -1.0e37;  // above MASKED: exp2(MASKED - maximum) is then 0 in a row that has not seen anything yet

const uint SUBGROUPS = WG / SG;
const uint TILE_Q = SUBGROUPS * MQ * FM;
const uint ELEMENTS = FM * FN / SG;           // of a sum matrix, per lane
const uint ALIGN = FN > FK ? FN : FK;
const uint WIDTH = (HD + ALIGN - 1) / ALIGN * ALIGN;
const uint PITCH = WIDTH / 8 + 1;             // 16-byte words from row to row
const uint ROW_WORDS = HD / 8;
const uint NK = WIDTH / FK, NO = WIDTH / FN;  // matrices along a query, along its sum
const uint NS = ROWS / FN, NP = ROWS / FK;    // matrices of scores, of weights
const uint THREAD_WORDS = (ROWS * (WIDTH / 8) + WG - 1) / WG;
const uint Q_ROWS = SUBGROUPS * FM;
const uint KV_WORDS = (2 * ROWS > Q_ROWS ? 2 * ROWS : Q_ROWS) * PITCH;
const uint STAGE_COLS = OUT_TYPE == OUT_Q8_1 ? 32 : 16, STAGE_MATRICES = STAGE_COLS / FN;  // columns staged for a store, and their matrices
const uint MAXIMA_PITCH = FN / 4 + 1, P_PITCH = ROWS / 8 + 1, STAGE_PITCH = STAGE_COLS / 4 + 1;
const uint MAXIMA_WORDS = FM * MAXIMA_PITCH, P_WORDS = FM * P_PITCH, STAGE_WORDS = FM * STAGE_PITCH;
const uint SCRATCH = MAXIMA_WORDS > P_WORDS ? MAXIMA_WORDS : P_WORDS;
const uint ALL_STAGES = SUBGROUPS * (STAGE_WORDS > MAXIMA_WORDS ? STAGE_WORDS : MAXIMA_WORDS);

// Lanes that share a row when its maximum or sum is found.
const uint REDUCE_LANES = SG / FM < 1 ? 1 : SG / FM > FN / 4 ? FN / 4 : SG / FM;

const uint OUT_WORDS = ALL_STAGES + (OUT_TYPE == OUT_FRAGMENTS ? TILE_Q * PITCH : 0);  // results in f32, then packed ones

shared uvec4 kv_rows[KV_WORDS > OUT_WORDS ? KV_WORDS : OUT_WORDS];
shared uvec4 scratch[ROW_LANES != 0 ? 1 : SUBGROUPS * SCRATCH];
shared float row_max[ROW_LANES != 0 ? 1 : TILE_Q];
shared float row_factor[ROW_LANES != 0 ? 1 : TILE_Q];

MATRIX_A query[MQ * NK];
MATRIX_SUM sums[MQ * NO];
MATRIX_SUM weight_sums[MQ];
uvec4 k_words[THREAD_WORDS], v_words[THREAD_WORDS];

// The first of this subgroup's query rows in matrix row m.
uint first_row_of(uint m) { return (gl_SubgroupID * MQ + m) * FM; }

#include "attention/prompt/prompt_blocks.glsl"

void fetch_k(uint base) { FETCH(load_k8, k_words) }
void fetch_v(uint base) { FETCH(load_v8, v_words) }

void put_k() { PUT(k_words, 0u, K_TYPE) }
void put_v() { PUT(v_words, ROWS, V_TYPE) }

// Loads the queries as matrices, FM of each subgroup at a time.
void load_queries(uint query0) {
    [[unroll]] for (uint m = 0; m < MQ; m++) {
        barrier();
        for (uint at = gl_LocalInvocationIndex; at < Q_ROWS * (WIDTH / 8); at += WG) {
            const uint row = at / (WIDTH / 8), word = at % (WIDTH / 8);
            const uint i = query0 + (row / FM * MQ + m) * FM + row % FM;
            const uint from = (min(token_of(i), p.n - 1u) * p.n_head + head_of(i)) * ROW_QUADS + 2u * min(word, ROW_WORDS - 1u);
            const float scale = word < ROW_WORDS ? p.scale : 0.0;
            const vec4 a = clamp(track_overflow(scale * q4[from]), -65504.0, 65504.0);
            const vec4 b = clamp(track_overflow(scale * q4[from + 1u]), -65504.0, 65504.0);
            kv_rows[row * PITCH + word] = uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
        }
        barrier();
        [[unroll]] for (uint k = 0; k < NK; k++)
            coopMatLoad(query[m * NK + k], kv_rows, gl_SubgroupID * FM * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
}

// Scores of a block for matrix row m of this subgroup's queries. Rows that a query may not see are MASKED.
void find_scores(uint m, uint base, bool masks, out MATRIX_SUM score[NS]) {
    [[unroll]] for (uint s = 0; s < NS; s++) score[s] = MATRIX_SUM(0.0);
    [[unroll]] for (uint k = 0; k < NK; k++) {
        [[unroll]] for (uint s = 0; s < NS; s++) {
            MATRIX_B b;
            coopMatLoad(b, kv_rows, s * FN * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            score[s] = coopMatMulAdd(query[m * NK + k], b, score[s]);
        }
    }
    if (HAS_SOFTCAP != 0)
        [[unroll]] for (uint s = 0; s < NS; s++)
            [[unroll]] for (uint e = 0; e < ELEMENTS; e++) score[s][e] = capped(score[s][e]);
    if (masks) mask_scores(first_row_of(m), base, score);
}

#include "attention/prompt/softmax_shared.glsl"
#include "attention/prompt/softmax_registers.glsl"

// Packs values 4 * quad .. 4 * quad + 3 of query i of the tile into the row of its head and token.
void stage_quad(uint query0, uint i, uint quad, vec4 v) {
    const uint heads = group_heads();
    if (quad >= ROW_QUADS) return;
    const uvec2 four = pack_four(token_of(query0 + i) < p.n ? v : vec4(0.0));
    const uint at = ALL_STAGES + (i % heads * (TILE_Q / heads) + i / heads) * PITCH + quad / 2u;
    kv_rows[at][2u * (quad & 1u)] = four.x;
    kv_rows[at][2u * (quad & 1u) + 1u] = four.y;
}

// The subgroups share out the matrices of the tile.
void store_fragments(uint query0) {
    const uint heads = group_heads(), tokens = TILE_Q / heads, token0 = query0 / heads, all = heads * (tokens / FN) * (HD / FK);
    for (uint base = 0; base < all; base += SUBGROUPS) {
        const uint matrix = base + gl_SubgroupID, k = matrix % (HD / FK), head = matrix / (HD / FK) % heads;
        const uint first = matrix / (HD / FK) / heads * FN;
        if (matrix < all && token0 + first < p.n) {
            MATRIX_B b;
            coopMatLoad(b, kv_rows, ALL_STAGES + (head * tokens + first) * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            const uint column = (gl_WorkGroupID.y * heads + head) * (HD / FK) + k;
            y_fragments[(token0 + first) / FN * p.y_stride + column * SG + gl_SubgroupInvocationID] = to_fragment(b);
        }
    }
}

// Matrix arrays are indexed by constants only, here and everywhere. For one computed index, even min() of constants, NVIDIA's driver 580 keeps
// the whole array in memory and stores every sum as soon as it is made: 4 times slower.
void store_results(uint query0, uint mine) {
    const uint stage = gl_SubgroupID * STAGE_WORDS, lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint m = 0; m < MQ; m++) {
        const uint first_row = first_row_of(m);
        if (ROW_LANES != 0) normalize_in_registers(m, query0);
        else normalize_in_shared(m, query0, mine);
        [[unroll]] for (uint o = 0; o < NO; o++) {
            coopMatStore(sums[m * NO + o], kv_rows, stage + o % STAGE_MATRICES * (FN / 4), STAGE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            if ((o + 1) % STAGE_MATRICES == 0 || o + 1 == NO) {
                const uint first = o / STAGE_MATRICES * STAGE_COLS;
                subgroup_sync();
                [[unroll]] for (uint base = 0; base < FM * (STAGE_COLS / 4); base += SG) {
                    const uint row = (base + lane) / (STAGE_COLS / 4), quad = (base + lane) % (STAGE_COLS / 4);
                    const float factor = ROW_LANES != 0 ? 1.0 : row_factor[first_row + row];
                    const vec4 v = factor * uintBitsToFloat(kv_rows[stage + row * STAGE_PITCH + quad]);
                    if (OUT_TYPE == OUT_FRAGMENTS) stage_quad(query0, first_row + row, first / 4u + quad, v);
                    else store_quad(query0 + first_row + row, first / 4u + quad, first / 4u + quad < ROW_QUADS, v);
                }
                subgroup_sync();
            }
        }
    }
    if (OUT_TYPE != OUT_FRAGMENTS) return;
    barrier();
    store_fragments(query0);
}

void main() {
    const uint query0 = first_query(TILE_Q), mine = gl_SubgroupID * SCRATCH;
    for (uint i = gl_LocalInvocationIndex; i < TILE_Q; i += WG) {
        visible[i] = visible_rows(query0 + i);
        if (ROW_LANES == 0) row_max[i] = MASKED;
    }
    [[unroll]] for (uint i = 0; i < MQ * OWN_ROWS; i++) {
        own_max[i] = MASKED;
        own_sum[i] = 0.0;
    }
    find_element_positions(gl_SubgroupID * MAXIMA_WORDS);
    barrier();
    const uvec2 every = find_range();

    [[unroll]] for (uint o = 0; o < MQ * NO; o++) sums[o] = MATRIX_SUM(0.0);
    [[unroll]] for (uint m = 0; m < MQ; m++) weight_sums[m] = MATRIX_SUM(0.0);
    load_queries(query0);

    if (hi > 0u) {
        uint base = lo / ROWS * ROWS;
        fetch_k(base);
        for (; base < hi; base += ROWS) {
            const bool masks = base < every.x || base + ROWS > every.y;
            put_k();
            fetch_v(base);
            barrier();
            MATRIX_A p_matrix[MQ][NP];
            [[unroll]] for (uint m = 0; m < MQ; m++) {
                MATRIX_SUM score[NS];
                find_scores(m, base, masks, score);
                if (ROW_LANES != 0) softmax_in_registers(m, score, p_matrix[m]);
                else softmax_in_shared(m, score, mine, p_matrix[m]);
            }
            put_v();
            if (base + ROWS < hi) fetch_k(base + ROWS);
            barrier();
            [[unroll]] for (uint k = 0; k < NP; k++)
                [[unroll]] for (uint o = 0; o < NO; o++) {
                    MATRIX_B b;
                    coopMatLoad(b, kv_rows, (ROWS + k * FK) * PITCH + o * FN / 8, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint m = 0; m < MQ; m++) sums[m * NO + o] = coopMatMulAdd(p_matrix[m][k], b, sums[m * NO + o]);
                }
        }
    }
    barrier();
    store_results(query0, mine);
    report_overflow();
}

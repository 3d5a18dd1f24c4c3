#version 450
// Attention of many tokens over an F16 cache by cooperative matrices (FLASH_ATTN_EXT): f16 queries, keys, values and weights, sums, maxima and
// exponentials in f32. Blocks and online softmax as in FlashAttention-2.
//
// Operands and queries: attention/prompt_iface.glsl. A workgroup takes a tile of TILE_Q queries, each subgroup MQ * FM of them, and walks the rows that
// any query of the tile sees in blocks of ROWS, which begin at multiples of ROWS. A block of K and one of V lie in shared memory as they are in the
// cache, in rows padded against bank conflicts; the next ones are on their way into registers meanwhile. For each block a subgroup
//   makes its scores            S [FM x ROWS] = Q [FM x HD] K^T, Q being in registers all along
//   finds their row maxima      elementwise over the matrices of S, then one matrix FM x FN by way of shared memory
//   makes weights               P = exp2(S - maximum), in f16 by way of shared memory from sums to matrix A
//   scales and adds             O [FM x HD] = O * exp2(old maximum - new) + P V
// Which row and column an element of a matrix has is the driver's affair: a matrix of such numbers, loaded at the start, says it. Sums of weights are
// kept elementwise and added up over a row in the end.
//
// Results as fragments (OUT_FRAGMENTS) go through shared memory once more, rows ordered by head and token: FN tokens of a head are the columns of
// matrices B. A tile then has whole groups of FN tokens: TILE_Q is a multiple of FN times the heads of a group.
//
// No defines; all is specialized. Head sizes are filled up with zeros to whole matrices.
#include "mat_mul/matrix.glsl"
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(constant_id = 5) const uint HD = 128;
layout(constant_id = 6) const uint ROWS = 32;
layout(constant_id = 7) const uint MQ = 1;        // matrices of query rows of a subgroup
layout(constant_id = 8) const uint OUT_TYPE = 0;  // OUT_*
layout(constant_id = 9) const uint HAS_SINKS = 0;

#include "attention/prompt_iface.glsl"

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
#include "attention/prompt_store.glsl"

#define MATRIX_WEIGHT coopmat<float16_t, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

const float LOWEST = -1.0e37;  // above MASKED, so that exp2(MASKED - maximum) is zero in a row that has seen nothing yet

const uint WARPS = WG / SG;
const uint TILE_Q = WARPS * MQ * FM;
const uint ELEMENTS = FM * FN / SG;           // of a matrix of sums, a lane
const uint ALIGN = FN > FK ? FN : FK;
const uint WIDTH = (HD + ALIGN - 1) / ALIGN * ALIGN;
const uint PITCH = WIDTH / 8 + 1;             // words of 16 bytes from row to row
const uint ROW_WORDS = HD / 8;
const uint NK = WIDTH / FK, NO = WIDTH / FN;  // matrices along a query, and of a query's sum
const uint NS = ROWS / FN, NP = ROWS / FK;    // matrices of scores, and of weights
const uint PIECES = (ROWS * (WIDTH / 8) + WG - 1) / WG;
const uint Q_ROWS = WARPS * FM;
const uint KV_WORDS = (2 * ROWS > Q_ROWS ? 2 * ROWS : Q_ROWS) * PITCH;
const uint STAGE_COLS = 32;                   // of what is stored
const uint MAX_PITCH = FN / 4 + 1, P_PITCH = ROWS / 8 + 1, STAGE_PITCH = STAGE_COLS / 4 + 1;
const uint MAX_WORDS = FM * MAX_PITCH, P_WORDS = FM * P_PITCH, STAGE_WORDS = FM * STAGE_PITCH;
const uint SCRATCH = MAX_WORDS > P_WORDS ? MAX_WORDS : P_WORDS;
const uint ALL_STAGES = WARPS * STAGE_WORDS;

// Lanes that share a row when its maximum or its sum is found.
const uint SHARE = SG / FM < 1 ? 1 : SG / FM > FN / 4 ? FN / 4 : SG / FM;

const uint OUT_WORDS = ALL_STAGES + (OUT_TYPE == OUT_FRAGMENTS ? TILE_Q * PITCH : 0);  // results in f32, behind them packed ones

shared uvec4 kv_rows[KV_WORDS > OUT_WORDS ? KV_WORDS : OUT_WORDS];
shared uvec4 scratch[WARPS * SCRATCH];
shared uvec2 seen[TILE_Q];
shared float row_top[TILE_Q];
shared float row_factor[TILE_Q];

MATRIX_A query[MQ * NK];
MATRIX_SUM sums[MQ * NO];
MATRIX_SUM weights[MQ];
uint place[ELEMENTS];  // row * 256 + column of an element
uvec4 k_words[PIECES], v_words[PIECES];
uint lo, hi;

#define FETCH(CACHE, INTO)                                                                                                      \
    [[unroll]] for (uint i = 0; i < PIECES; i++) {                                                                              \
        const uint at = i * WG + gl_LocalInvocationIndex, row = base + at / (WIDTH / 8), word = at % (WIDTH / 8);               \
        const uvec4 words = CACHE[(kv_head() * p.n_ctx + min(row, hi - 1u)) * ROW_WORDS + min(word, ROW_WORDS - 1u)];           \
        INTO[i] = row >= lo && row < hi && word < ROW_WORDS ? words : uvec4(0u);                                                \
    }
void fetch_k(uint base) { FETCH(k4, k_words) }
void fetch_v(uint base) { FETCH(v4, v_words) }

#define PUT(FROM, FIRST)                                                                                                        \
    [[unroll]] for (uint i = 0; i < PIECES; i++) {                                                                              \
        const uint at = i * WG + gl_LocalInvocationIndex;                                                                       \
        if (ROWS * (WIDTH / 8) % WG == 0 || at < ROWS * (WIDTH / 8))                                                            \
            kv_rows[(FIRST + at / (WIDTH / 8)) * PITCH + at % (WIDTH / 8)] = FROM[i];                                           \
    }
void put_k() { PUT(k_words, 0u) }
void put_v() { PUT(v_words, ROWS) }

// Queries as matrices, FM of each subgroup at a time.
void load_queries(uint query0) {
    [[unroll]] for (uint m = 0; m < MQ; m++) {
        barrier();
        for (uint at = gl_LocalInvocationIndex; at < Q_ROWS * (WIDTH / 8); at += WG) {
            const uint row = at / (WIDTH / 8), word = at % (WIDTH / 8);
            const uint i = query0 + (row / FM * MQ + m) * FM + row % FM;
            const uint from = (min(token_of(i), p.n - 1u) * p.n_head + head_of(i)) * ROW_QUADS + 2u * min(word, ROW_WORDS - 1u);
            const float scale = word < ROW_WORDS ? p.scale : 0.0;
            const vec4 a = clamp(scale * q4[from], -65504.0, 65504.0), b = clamp(scale * q4[from + 1u], -65504.0, 65504.0);
            kv_rows[row * PITCH + word] = uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
        }
        barrier();
        [[unroll]] for (uint k = 0; k < NK; k++)
            coopMatLoad(query[m * NK + k], kv_rows, gl_SubgroupID * FM * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
}

// Which row and column each element of a matrix of sums has.
void find_places(uint mine) {
    for (uint at = gl_SubgroupInvocationID; at < FM * FN / 4; at += SG) {
        const uint row = at / (FN / 4), quad = at % (FN / 4);
        scratch[mine + row * MAX_PITCH + quad] = floatBitsToUint(vec4(float(row * 256u + 4u * quad)) + vec4(0.0, 1.0, 2.0, 3.0));
    }
    subgroup_sync();
    MATRIX_SUM numbers;
    coopMatLoad(numbers, scratch, mine, MAX_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) place[e] = uint(numbers[e]);
    subgroup_sync();
}

// A lane's part of its row of the matrix in scratch, by maximum and by sum; lane / SHARE + turn is the row.
float part_max(uint at) {
    float found = MASKED;
    [[unroll]] for (uint i = 0; i < FN / 4 / SHARE; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found = max(found, max(max(v.x, v.y), max(v.z, v.w)));
    }
    [[unroll]] for (uint step_size = 1; step_size < SHARE; step_size *= 2) found = max(found, subgroupShuffleXor(found, step_size));
    return found;
}

float part_sum(uint at) {
    float found = 0.0;
    [[unroll]] for (uint i = 0; i < FN / 4 / SHARE; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found += v.x + v.y + v.z + v.w;
    }
    [[unroll]] for (uint step_size = 1; step_size < SHARE; step_size *= 2) found += subgroupShuffleXor(found, step_size);
    return found;
}

// The rows' new maxima and what that makes of the sums so far, from a matrix whose row maxima are those of the scores.
void find_maxima(MATRIX_SUM higher, uint mine, uint first_row) {
    coopMatStore(higher, scratch, mine, MAX_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint turn = 0; turn < FM; turn += SG / SHARE) {
        const uint row = turn + gl_SubgroupInvocationID / SHARE;
        const float found = part_max(mine + min(row, FM - 1u) * MAX_PITCH + gl_SubgroupInvocationID % SHARE * (FN / 4 / SHARE));
        if (row < FM && gl_SubgroupInvocationID % SHARE == 0u) {
            const float before = row_top[first_row + row], now = max(before, found);
            row_top[first_row + row] = now;
            row_factor[first_row + row] = exp2(before - now);
        }
    }
    subgroup_sync();
}

// One block for matrix row m of this subgroup's queries: scores and weights, which become matrices A.
void make_weights(uint m, uint base, bool masks, uint mine, out MATRIX_A p_matrix[NP]) {
    const uint first_row = (gl_SubgroupID * MQ + m) * FM;
    MATRIX_SUM score[NS];
    [[unroll]] for (uint s = 0; s < NS; s++) score[s] = MATRIX_SUM(0.0);
    [[unroll]] for (uint k = 0; k < NK; k++)
        [[unroll]] for (uint s = 0; s < NS; s++) {
            MATRIX_B b;
            coopMatLoad(b, kv_rows, s * FN * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            score[s] = coopMatMulAdd(query[m * NK + k], b, score[s]);
        }
    if (masks) {
        [[unroll]] for (uint e = 0; e < ELEMENTS; e++) {
            const uvec2 rows = seen[first_row + place[e] / 256u];
            [[unroll]] for (uint s = 0; s < NS; s++) {
                const uint row = base + s * FN + place[e] % 256u;
                score[s][e] = row >= rows.x && row < rows.y ? score[s][e] : MASKED;
            }
        }
    }
    MATRIX_SUM higher = score[0];
    [[unroll]] for (uint s = 1; s < NS; s++)
        [[unroll]] for (uint e = 0; e < ELEMENTS; e++) higher[e] = max(higher[e], score[s][e]);
    find_maxima(higher, mine, first_row);

    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) {
        const uint row = first_row + place[e] / 256u;
        const float top = max(row_top[row], LOWEST), factor = row_factor[row];
        float weight = weights[m][e] * factor;
        [[unroll]] for (uint s = 0; s < NS; s++) {
            score[s][e] = exp2(score[s][e] - top);
            weight += score[s][e];
        }
        weights[m][e] = weight;
        [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o][e] *= factor;
    }
    [[unroll]] for (uint s = 0; s < NS; s++)
        coopMatStore(MATRIX_WEIGHT(score[s]), scratch, mine + s * FN / 8, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint k = 0; k < NP; k++) coopMatLoad(p_matrix[k], scratch, mine + k * FK / 8, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
}

// Values 4 * quad .. of query i of the tile, packed, into its head's and token's row.
void stage_quad(uint query0, uint i, uint quad, vec4 v) {
    const uint heads = group_heads();
    if (quad >= ROW_QUADS) return;
    const uvec2 four = pack_four(token_of(query0 + i) < p.n ? v : vec4(0.0));
    const uint at = ALL_STAGES + (i % heads * (TILE_Q / heads) + i / heads) * PITCH + quad / 2u;
    kv_rows[at][2u * (quad & 1u)] = four.x;
    kv_rows[at][2u * (quad & 1u) + 1u] = four.y;
}

// Subgroups take turns at the matrices of the tile.
void store_fragments(uint query0) {
    const uint heads = group_heads(), tokens = TILE_Q / heads, token0 = query0 / heads, all = heads * (tokens / FN) * (HD / FK);
    for (uint turn = 0; turn < all; turn += WARPS) {
        const uint matrix = turn + gl_SubgroupID, k = matrix % (HD / FK), head = matrix / (HD / FK) % heads;
        const uint first = matrix / (HD / FK) / heads * FN;
        if (matrix < all && token0 + first < p.n) {
            MATRIX_B b;
            coopMatLoad(b, kv_rows, ALL_STAGES + (head * tokens + first) * PITCH + k * FK / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            const uint column = (gl_WorkGroupID.y * heads + head) * (HD / FK) + k;
            y_fragments[(token0 + first) / FN * p.y_stride + column * SG + gl_SubgroupInvocationID] = to_fragment(b);
        }
    }
}

void store_results(uint query0, uint mine) {
    const uint stage = gl_SubgroupID * STAGE_WORDS, lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint m = 0; m < MQ; m++) {
        const uint first_row = (gl_SubgroupID * MQ + m) * FM;
        coopMatStore(weights[m], scratch, mine, MAX_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_sync();
        [[unroll]] for (uint turn = 0; turn < FM; turn += SG / SHARE) {
            const uint row = turn + lane / SHARE;
            const float weight = part_sum(mine + min(row, FM - 1u) * MAX_PITCH + lane % SHARE * (FN / 4 / SHARE));
            if (row < FM && lane % SHARE == 0u) row_factor[first_row + row] = normalizer(query0 + first_row + row, row_top[first_row + row], weight);
        }
        subgroup_sync();
        [[unroll]] for (uint first = 0; first < WIDTH; first += STAGE_COLS) {
            [[unroll]] for (uint o = 0; o < STAGE_COLS / FN; o++)
                if (first + o * FN < WIDTH)
                    coopMatStore(sums[m * NO + min(first / FN + o, NO - 1)], kv_rows, stage + o * FN / 4, STAGE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            subgroup_sync();
            [[unroll]] for (uint turn = 0; turn < FM * (STAGE_COLS / 4); turn += SG) {
                const uint row = (turn + lane) / (STAGE_COLS / 4), quad = (turn + lane) % (STAGE_COLS / 4);
                const vec4 v = row_factor[first_row + row] * uintBitsToFloat(kv_rows[stage + row * STAGE_PITCH + quad]);
                if (OUT_TYPE == OUT_FRAGMENTS) stage_quad(query0, first_row + row, first / 4u + quad, v);
                else store_quad(query0 + first_row + row, first / 4u + quad, first / 4u + quad < ROW_QUADS, v);
            }
            subgroup_sync();
        }
    }
    if (OUT_TYPE != OUT_FRAGMENTS) return;
    barrier();
    store_fragments(query0);
}

void main() {
    const uint query0 = first_query(TILE_Q), mine = gl_SubgroupID * SCRATCH;
    for (uint i = gl_LocalInvocationIndex; i < TILE_Q; i += WG) {
        seen[i] = rows_of(query0 + i);
        row_top[i] = MASKED;
    }
    find_places(mine);
    barrier();
    // (first, end) of rows that any query sees, and of those that all see.
    uvec2 any = uvec2(0xffffffffu, 0u), every = uvec2(0u, 0xffffffffu);
    for (uint i = gl_SubgroupInvocationID; i < TILE_Q; i += SG) {
        const uvec2 rows = seen[i];
        if (rows.y > 0u) any.x = min(any.x, rows.x);
        any.y = max(any.y, rows.y);
        every = uvec2(max(every.x, rows.x), min(every.y, rows.y));
    }
    lo = subgroupMin(any.x);
    hi = subgroupMax(any.y);
    every = uvec2(subgroupMax(every.x), subgroupMin(every.y));

    [[unroll]] for (uint o = 0; o < MQ * NO; o++) sums[o] = MATRIX_SUM(0.0);
    [[unroll]] for (uint m = 0; m < MQ; m++) weights[m] = MATRIX_SUM(0.0);
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
            [[unroll]] for (uint m = 0; m < MQ; m++) make_weights(m, base, masks, mine, p_matrix[m]);
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
}

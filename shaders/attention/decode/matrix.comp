#version 450
// Attention of few tokens over a KV cache by cooperative matrices, K and V straight into registers (FLASH_ATTN_EXT).
//
//   out[t, h, :] = sum over rows r of softmax_r(cap(scale * q[t, h, :] . k[r, :])) * v[r, :], rows and cap as in attention/decode/attention.comp
//
// Queries and weights are f16; sums, maxima and exponentials f32.
//
//   binding 0   q F32 [n, n_head, HD]
//   binding 1   cache of K, F16 [n_head_kv, n_ctx, HD]
//   binding 2   cache of V, the same
//   binding 3   pos I32 [n]; -1: padding, whose output is zero
//   binding 4   y F32 [n, n_head * HD]; with OUT_UNITS F16 in unit order (gemm/units.glsl), y_stride 16-byte words per OUT_FN columns; with
//               OUT_Q8_1 rows of Q8_1 (common/q8_1.glsl)
//   binding 5   sinks F32 [n_head] (HAS_SINKS)
//   binding 6   overflow word of queries as f16 (gemm/overflow.glsl)
//   bindings 7, 8   slots I32 [n], and pages I32 [n_slots, max_pages] (PAGE; attention/pages.glsl): pos counts rows of the token's sequence
//   bindings 9, 10  results of splits: for each (token, head group, split) HEADS * HD floats, then HEADS (maximum, sum of weights), in vec4;
//                   and tickets, one for each (token, head group) (SPLITS)
//   bindings 11 to 13  arrivals (ARRIVES), arrivals of q and of rows (EXPECTED), state of spin-waits (common/arrivals.glsl)
// A binding that a kernel does not need may be any buffer.
//
// Workgroup (x, y, z) takes heads x * HEADS .. of one kv head, token z, and split y of the rows. Its subgroups take blocks of BLOCK rows in
// turns, each by itself, and their results meet at the end. A block takes
//   scores   S [FM rows x FN heads] = K Q^T: a lane loads words of its rows of K, which are its elements of matrices A
//   weights  exp2(S - maximum so far): S goes through shared memory, from which a lane takes the rows of its column of matrix B
//   sums     O [FM values x FN heads] += V^T W: a lane loads V_VALUES neighbouring values of the rows that its elements of matrix A stand for, and
//            gives matrix v value v of each
// So a row of K or V is read once for all heads that share it, and nothing but S passes through shared memory. Which lane holds which elements
// is what the check at start-up looks for (gemm/matrix.glsl). K and V of the next block are under way meanwhile.
//
// The maximum of a head is raised when a block's is more than SLACK above it, so that sums are seldom rescaled: weights are at most 2^SLACK.
//
// Split KV as in attention/decode/splits.glsl: one workgroup adds the results of all splits, in their order. Barrier-free (SPINS_ON_X) it is the
// one with the last split, which spins on the others' results; else the last to arrive.
//
// No defines; everything is a specialization constant.
#include "gemm/matrix.glsl"
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_EXT_shader_16bit_storage : require

layout(constant_id = 5) const uint ROW_LANES = 4;     // as in gemm/matrix.glsl
layout(constant_id = 6) const uint HD = 128;          // values of a head, a multiple of 4 FM and of 8 ROW_LANES
layout(constant_id = 7) const uint HEADS = 4;         // query heads of a workgroup, at most FN
layout(constant_id = 8) const uint SPLITS = 1;
layout(constant_id = 9) const uint HAS_SINKS = 0;
layout(constant_id = 10) const uint HAS_SOFTCAP = 0;  // attention/softcap.glsl
layout(constant_id = 11) const uint OUT_UNITS = 0;
layout(constant_id = 12) const uint OUT_FN = 8;       // columns and depth of the matrices that the output is for
layout(constant_id = 13) const uint OUT_FK = 16;
layout(constant_id = 14) const uint PAGE = 0;         // rows of a page, a multiple of FM and FK; 0: the cache has one sequence
layout(constant_id = 15) const uint SPINS_ON_X = 0;   // 1: the combiner spins on the results of the other splits
layout(constant_id = 16) const uint ARRIVES = 0;      // common/arrivals.glsl
layout(constant_id = 17) const uint EXPECTED = 0;     // likewise
layout(constant_id = 18) const uint OUT_Q8_1 = 0;     // HD is then a multiple of 32, and a subgroup has 8 lanes at least

#define SYNC_SENTINEL 1
#define SPINS 1
#define BIND_SYNC_STATE 13
#include "common/sentinel.glsl"
#define BIND_ARRIVALS 11
#define BIND_EXPECTED 12
#include "common/arrivals.glsl"
#define OVERFLOW_BINDING 6
#include "gemm/overflow.glsl"

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint n_head_kv;
    uint n_ctx;           // rows of a cache
    uint rows;            // that one sequence may have
    uint window;          // 0: none; of chunks: attention/window.glsl
    uint rows_per_split;
    float scale;          // includes log2 e
    float softcap;        // includes log2 e
    uint max_pages;
    uint y_stride;
} p;

layout(std430, set = 0, binding = 0) readonly buffer Q { vec4 q4[]; };
layout(std430, set = 0, binding = 1) readonly buffer CacheK { uvec4 k4[]; };
layout(std430, set = 0, binding = 2) readonly buffer CacheV { uvec4 v4[]; };
layout(std430, set = 0, binding = 2) readonly buffer CacheVPairs { uvec2 v2[]; };
layout(std430, set = 0, binding = 3) readonly buffer Pos { int pos[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Y { vec4 y4[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YHalves { float16_t y_half[]; };
layout(std430, set = 0, binding = 4) writeonly buffer YWords { uint y_words[]; };
layout(std430, set = 0, binding = 5) readonly buffer Sinks { float sinks[]; };
layout(std430, set = 0, binding = 7) readonly buffer Slots { int slots[]; };
layout(std430, set = 0, binding = 8) readonly buffer Pages { int pages[]; };
layout(std430, set = 0, binding = 9) coherent volatile buffer Partial { vec4 partial4[]; };
layout(std430, set = 0, binding = 9) coherent volatile buffer PartialPairs { vec2 partial2[]; };
layout(std430, set = 0, binding = 10) coherent buffer Tickets { uint tickets[]; };
#include "common/ticket.glsl"

const float LOG2_E = 1.44269504;
const float MASKED = -3.0e38;
const float SLACK = 4.0;

#include "attention/softcap.glsl"
#include "attention/window.glsl"
#include "attention/weight.glsl"
#include "gemm/pack.glsl"
// Of eight neighbouring lanes, which have neighbouring vec4 of the results.
uint group_max(uint v, uint lanes) {
    [[unroll]] for (uint i = 1; i < 8; i *= 2) v = max(v, subgroupShuffleXor(v, i));
    return v;
}

uint group_sum(uint v, uint lanes) {
    [[unroll]] for (uint i = 1; i < 8; i *= 2) v += subgroupShuffleXor(v, i);
    return v;
}

#include "common/q8_1.glsl"
// The order of the product that reads the output.
#define FN OUT_FN
#define FK OUT_FK
#include "gemm/units.glsl"
#undef FN
#undef FK

const uint SUBGROUPS = WG / SG;
const uint GROUPS = SG / ROW_LANES;      // groups of lanes that share rows
const uint VALUES = FK / ROW_LANES;      // values along K that a lane holds of a row, 1, 2, 4 or 8
const uint A_ROWS = FM / GROUPS;         // rows of a matrix A that a lane holds elements of
const uint B_COLUMNS = FN / GROUPS;      // columns of a matrix B
const uint BLOCK = FM > FK ? FM : FK;    // rows of the cache in a block
const uint MS = BLOCK / FM, NP = BLOCK / FK;
const uint K_WORDS = HD / (8 * ROW_LANES);  // words of a row of K that a lane loads
const uint NQ = HD / FK;                    // matrices of queries
const uint V_VALUES = HD % (8 * FM) == 0 ? 8 : 4;
const uint V_SETS = HD / (FM * V_VALUES);
const uint NO = V_SETS * V_VALUES;          // matrices of sums: row m of matrix v of a set is value m * V_VALUES + v of it
const uint SCORE_PITCH = BLOCK / 4 + 1;
const uint AREA = FN * HD / 4 > FN * SCORE_PITCH ? FN * HD / 4 : FN * SCORE_PITCH;
const uint ITEMS = HEADS * HD / 4;          // vec4 of the results
const uint PARTIAL = ITEMS + (HEADS + 1) / 2;

shared vec4 area[SUBGROUPS * AREA];         // of each subgroup scores of a block; at the end its sums, [FN][NO][FM]
shared float factors[SUBGROUPS * FN];
shared vec2 subgroup_max_sum[SUBGROUPS * FN];  // (maximum, sum of weights)

MATRIX_B query[NQ];
MATRIX_SUM sums[NO];
uvec4 k_now[MS * A_ROWS * K_WORDS], v_now[NP * VALUES * A_ROWS * V_SETS];
float score_max[B_COLUMNS], weight_sum[B_COLUMNS];

uint lo, hi;        // the rows that the token sees
uint page_table;
uint kv_rows;       // first row of the kv head

float16_t half_at(uvec4 word, uint i) {
    const f16vec2 pair = unpackFloat2x16(word[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
}

uint group() { return gl_SubgroupInvocationID / ROW_LANES; }
uint row_lane() { return gl_SubgroupInvocationID % ROW_LANES; }

// The place of a block's first row.
uint physical(uint base) {
    base = min(base, hi - 1u);
    return PAGE != 0 ? uint(pages[page_table + base / max(PAGE, 1u)]) * PAGE + base % max(PAGE, 1u) : base;
}

// Row r of the block at `base`, or in place of one that the token does not see, whose weight is 0, the nearest that it does.
uint seen_row(uint r, uint base) { return clamp(base + r, lo, hi - 1u) - base; }

// The block at `base`, which lies at `at`.
void load_k(uint at, uint base) {
    [[unroll]] for (uint r = 0; r < MS * A_ROWS; r++) {
        const uint row = kv_rows + at + seen_row(r * GROUPS + group(), base);
        [[unroll]] for (uint j = 0; j < K_WORDS; j++) k_now[r * K_WORDS + j] = k4[row * (HD / 8) + j * ROW_LANES + row_lane()];
    }
}

void load_v(uint at, uint base) {
    [[unroll]] for (uint e = 0; e < NP * VALUES; e++) {
        const uint row = kv_rows + at + seen_row(e / VALUES * FK + row_lane() * VALUES + e % VALUES, base);
        [[unroll]] for (uint i = 0; i < A_ROWS * V_SETS; i++) {
            const uint word = (i / A_ROWS * FM + i % A_ROWS * GROUPS + group()) + row * (HD / V_VALUES);
            v_now[e * (A_ROWS * V_SETS) + i] = V_VALUES == 8 ? v4[word] : uvec4(v2[word], 0u, 0u);
        }
    }
}

// Queries as matrices B, scaled. zero: a 0 that the compiler cannot know before they have arrived.
void load_queries(uint token, uint head0, uint zero) {
    [[unroll]] for (uint o = 0; o < B_COLUMNS; o++) {
        const uint head = o * GROUPS + group();
        const uint from = (token * p.n_head + head0 + min(head, HEADS - 1u)) * (HD / 4) + zero;
        [[unroll]] for (uint j = 0; j < K_WORDS; j++) {
            vec4 v[2];
            [[unroll]] for (uint i = 0; i < 2; i++) {
                v[i] = q4[from + 2u * (j * ROW_LANES + row_lane()) + i];
                v[i] = head < HEADS ? clamp(track_overflow(p.scale * v[i]), -65504.0, 65504.0) : vec4(0.0);
            }
            [[unroll]] for (uint e = 0; e < 8; e++) query[j * (8 / VALUES) + e / VALUES][o * VALUES + e % VALUES] = float16_t(v[e / 4][e % 4]);
        }
    }
}

// Scores of the block in k_now, into this subgroup's area: [FN][SCORE_PITCH].
void find_scores() {
    MATRIX_SUM score[2 * MS];  // two chains of sums, for half the latency
    [[unroll]] for (uint i = 0; i < 2 * MS; i++) score[i] = MATRIX_SUM(0.0);
    [[unroll]] for (uint q = 0; q < NQ; q++)
        [[unroll]] for (uint m = 0; m < MS; m++) {
            MATRIX_A a;
            [[unroll]] for (uint r = 0; r < A_ROWS; r++)
                [[unroll]] for (uint e = 0; e < VALUES; e++)
                    a[r * VALUES + e] = half_at(k_now[(m * A_ROWS + r) * K_WORDS + q * VALUES / 8], q * VALUES % 8 + e);
            score[2 * m + q % 2] = coopMatMulAdd(a, query[q], score[2 * m + q % 2]);
        }
    [[unroll]] for (uint m = 0; m < MS; m++)
        coopMatStore(score[2 * m] + score[2 * m + 1], area, gl_SubgroupID * AREA + m * FM / 4, SCORE_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
}

// Score number i of column `column` of those that this lane has in matrices B.
float score_of(uint column, uint i) {
    const uint first = i / VALUES * FK + row_lane() * VALUES;
    const uint from = gl_SubgroupID * AREA + column * SCORE_PITCH;
    if (VALUES % 4 == 0) return area[from + first / 4u + i % VALUES / 4][i % 4];
    return area[from + (first + i % VALUES) / 4u][(first + i % VALUES) % 4u];
}

// Weights of a block whose first row is `base`, as matrices B. Whether maxima were raised: then sums are to be rescaled.
bool find_weights(uint base, out MATRIX_B weights[NP]) {
    float score[B_COLUMNS * NP * VALUES], factor[B_COLUMNS];
    bool raises = false;
    [[unroll]] for (uint o = 0; o < B_COLUMNS; o++) {
        float top = MASKED;
        [[unroll]] for (uint i = 0; i < NP * VALUES; i++) {
            const uint row = base + i / VALUES * FK + row_lane() * VALUES + i % VALUES;
            const float s = capped(score_of(o * GROUPS + group(), i));
            score[o * NP * VALUES + i] = row >= lo && row < hi ? s : MASKED;
            top = max(top, score[o * NP * VALUES + i]);
        }
        [[unroll]] for (uint lanes = 1; lanes < ROW_LANES; lanes *= 2) top = max(top, subgroupShuffleXor(top, lanes));
        const float next = top > score_max[o] + SLACK ? top : score_max[o];
        raises = raises || next != score_max[o];
        factor[o] = exp2(score_max[o] - next);
        score_max[o] = next;
        weight_sum[o] *= factor[o];
        [[unroll]] for (uint i = 0; i < NP * VALUES; i++) {
            const float16_t w = float16_t(weight_of(score[o * NP * VALUES + i], next));
            weight_sum[o] += float(w);
            weights[i / VALUES][o * VALUES + i % VALUES] = w;
        }
    }
    if (row_lane() == 0u)
        [[unroll]] for (uint o = 0; o < B_COLUMNS; o++) factors[gl_SubgroupID * FN + o * GROUPS + group()] = factor[o];
    return subgroupAny(raises);
}

void rescale_sums() {
    MATRIX_SUM scale;  // all rows alike
    coopMatLoad(scale, factors, gl_SubgroupID * FN, 0, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint i = 0; i < NO; i++) sums[i] = sums[i] * scale;
}

void add_values(MATRIX_B weights[NP]) {
    [[unroll]] for (uint i = 0; i < NO; i++)
        [[unroll]] for (uint k = 0; k < NP; k++) {
            MATRIX_A a;
            [[unroll]] for (uint r = 0; r < A_ROWS; r++)
                [[unroll]] for (uint e = 0; e < VALUES; e++)
                    a[r * VALUES + e] = half_at(v_now[(k * VALUES + e) * (A_ROWS * V_SETS) + i / V_VALUES * A_ROWS + r], i % V_VALUES);
            sums[i] = coopMatMulAdd(a, weights[k], sums[i]);
        }
}

// Adds what the subgroups have of vec4 `item` of the results. max_sum: (maximum, sum of weights) of its head.
vec4 merged(uint item, out vec2 max_sum) {
    const uint head = item / (HD / 4), first = item % (HD / 4) * 4u;
    const uint at = head * HD + (first / (FM * V_VALUES) * V_VALUES + first % V_VALUES) * FM + first % (FM * V_VALUES) / V_VALUES;
    max_sum = vec2(MASKED, 0.0);
    [[unroll]] for (uint s = 0; s < SUBGROUPS; s++) max_sum.x = max(max_sum.x, subgroup_max_sum[s * FN + head].x);
    vec4 total = vec4(0.0);
    [[unroll]] for (uint s = 0; s < SUBGROUPS; s++) {
        const vec2 mine = subgroup_max_sum[s * FN + head];
        const float e = exp2(mine.x - max_sum.x);
        max_sum.y += e * mine.y;
        [[unroll]] for (uint i = 0; i < 4; i++) total[i] += e * area[s * AREA + (at + i * FM) / 4u][(at + i * FM) % 4u];
    }
    return total;
}

const uint AT_ONCE = SPLITS < 16 ? SPLITS : 16;

// Adds the results of `used` splits of vec4 `item`, in their order. own: the split that this workgroup has itself, total and max_sum; `used`
// where it reads all of them.
vec4 combined(uint tile, uint used, uint item, uint own, vec4 own_total, inout vec2 max_sum) {
    const uint head = item / (HD / 4);
    vec2 all = vec2(MASKED, 0.0);
    vec4 total = vec4(0.0);
    for (uint first = 0; first < used; first += AT_ONCE) {
        vec4 part[AT_ONCE];
        vec2 part_max_sum[AT_ONCE];
        bool valid = true;
        SPIN_UNTIL(valid = true;
                   [[unroll]] for (uint s = 0; s < AT_ONCE; s++) {
                       const uint split = min(first + s, used - 1u);
                       const uint at = (tile * SPLITS + (split == own ? 0u : split)) * PARTIAL;
                       part[s] = partial4[at + item];
                       part_max_sum[s] = partial2[2u * (at + ITEMS) + head];
                       valid = valid && arrived(part[s]) && arrived(part_max_sum[s]);
                   }, SPINS_ON_X == 0 || valid)
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++)
            if (min(first + s, used - 1u) == own) {
                part[s] = own_total;
                part_max_sum[s] = max_sum;
            }
        float next = all.x;
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++) next = max(next, part_max_sum[s].x);
        const float rescale = exp2(all.x - next);
        all = vec2(next, all.y * rescale);
        total *= rescale;
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++) {
            const float e = first + s < used ? exp2(part_max_sum[s].x - next) : 0.0;
            all.y += e * part_max_sum[s].y;
            total += e * part[s];
        }
    }
    max_sum = all;
    return total;
}

// Normalizes vec4 `item` of the results and stores it.
void finish(uint token, uint head0, uint item, vec4 total, vec2 max_sum) {
    const uint head = head0 + item / (HD / 4);
    if (HAS_SINKS != 0) {
        const float sink = sinks[head] * LOG2_E, next = max(max_sum.x, sink), rescale = exp2(max_sum.x - next);
        total *= rescale / (max_sum.y * rescale + exp2(sink - next));
    } else total = max_sum.y == 0.0 ? vec4(0.0) : total / max_sum.y;
    const uint quad = head0 * (HD / 4) + item;
    if (OUT_Q8_1 != 0) {
        q8_1_store(token, p.n_head * (HD / 32), quad, q8_1_pack(quad, total));
        return;
    }
    if (OUT_UNITS == 0) {
        y4[token * p.n_head * (HD / 4) + quad] = not_sentinel(total);
        return;
    }
    const uvec2 packed = pack_four(total);
    if (LANE_VALUES >= 4) y2[unit_place(token, 4u * quad, p.y_stride) / 4u] = packed;
    else
        [[unroll]] for (uint e = 0; e < 4; e++)
            y_half[unit_place(token, 4u * quad + e, p.y_stride)] = float16_t(unpackHalf2x16(packed[e / 2])[e % 2]);
}

void main() {
    const uint tid = gl_LocalInvocationID.x, lane = gl_SubgroupInvocationID, token = gl_WorkGroupID.z, split = gl_WorkGroupID.y;
    const uint head0 = gl_WorkGroupID.x * HEADS, tile = token * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    kv_rows = head0 / (p.n_head / p.n_head_kv) * p.n_ctx;
    const int at = pos[token];
    const int slot = PAGE != 0 ? slots[token] : 0;
    page_table = uint(slot) * p.max_pages;
    hi = min(uint(at + 1), p.rows);
    if (hi == 0u) {
        wait_for_arrivals();
        if (split != 0u) return;
        for (uint item = tid; item < ITEMS; item += WG) finish(token, head0, item, vec4(0.0), vec2(MASKED, 0.0));
        arrive();
        return;
    }
    lo = first_row(hi, p.window);
    const uint first_block = lo / BLOCK, all_blocks = (hi + BLOCK - 1u) / BLOCK - first_block;
    const uint wanted = min(SPLITS, (hi - lo + p.rows_per_split - 1u) / p.rows_per_split);
    const uint length = (all_blocks + wanted - 1u) / wanted, used = (all_blocks + length - 1u) / length;
    if (split >= used) {
        wait_for_arrivals();
        return;
    }
    const uint end = (first_block + min((split + 1u) * length, all_blocks)) * BLOCK, turn = SUBGROUPS * BLOCK;
    uint base = (first_block + split * length + gl_SubgroupID) * BLOCK;

    // Rows of the cache that earlier steps stored need no wait.
    uint first_new = hi;
    if (EXPECTED != 0)
        for (uint t = lane; t < p.n; t += SG)
            if (PAGE == 0 || slots[t] == slot) first_new = min(first_new, uint(pos[t]));  // of padding it is 2^32 - 1
    first_new = subgroupMin(first_new);
    const bool any = base < end, loaded = any && base + BLOCK <= first_new;
    uint at_now = any ? physical(base) : 0u, at_next = any ? physical(base + turn) : 0u;
    if (loaded) {
        load_k(at_now, base);
        load_v(at_now, base);
    }
    const uint zero = wait_for_arrivals();
    kv_rows += zero;
    if (any && !loaded) {
        load_k(at_now, base);
        load_v(at_now, base);
    }
    load_queries(token, head0, zero);
    [[unroll]] for (uint i = 0; i < NO; i++) sums[i] = MATRIX_SUM(0.0);
    [[unroll]] for (uint o = 0; o < B_COLUMNS; o++) {
        score_max[o] = MASKED;
        weight_sum[o] = 0.0;
    }
    // All subgroups take as many turns, so that some drivers may make workgroup barriers of subgroup barriers.
    [[dont_unroll]] for (uint first = base - gl_SubgroupID * BLOCK; first < end; first += turn) {
        const bool mine = base < end, more = base + turn < end;
        const uint at_after = more ? physical(base + 2u * turn) : 0u;
        if (mine) find_scores();
        if (more) load_k(at_next, base + turn);
        subgroup_sync();
        MATRIX_B weights[NP];
        const bool raises = mine && find_weights(base, weights);
        subgroup_sync();
        if (raises) rescale_sums();
        if (mine) add_values(weights);
        if (more) load_v(at_next, base + turn);
        at_next = at_after;
        base += turn;
    }
    report_overflow();
    [[unroll]] for (uint i = 0; i < NO; i++)
        coopMatStore(sums[i], area, gl_SubgroupID * AREA + i * FM / 4, HD / 4, gl_CooperativeMatrixLayoutColumnMajor);
    [[unroll]] for (uint o = 0; o < B_COLUMNS; o++) {
        [[unroll]] for (uint lanes = 1; lanes < ROW_LANES; lanes *= 2) weight_sum[o] += subgroupShuffleXor(weight_sum[o], lanes);
        if (row_lane() == 0u) subgroup_max_sum[gl_SubgroupID * FN + o * GROUPS + group()] = vec2(score_max[o], weight_sum[o]);
    }
    barrier();
    const bool adds = SPINS_ON_X != 0 && split == used - 1u;
    for (uint item = tid; item < ITEMS; item += WG) {
        vec2 max_sum;
        vec4 total = merged(item, max_sum);
        if (SPLITS > 1 && used > 1u) {
            if (!adds) {
                const uint place = (tile * SPLITS + split) * PARTIAL;
                partial4[place + item] = not_sentinel(total);
                if (item % (HD / 4) == 0u)
                    partial2[2u * (place + ITEMS) + item / (HD / 4)] = vec2(not_sentinel(max_sum.x), not_sentinel(max_sum.y));
                continue;
            }
            total = combined(tile, used, item, split, total, max_sum);
        }
        finish(token, head0, item, total, max_sum);
    }
    if (SPLITS > 1 && used > 1u && !adds) {
        if (SPINS_ON_X != 0 || !last_to_arrive(tile, used)) return;
        for (uint item = tid; item < ITEMS; item += WG) {
            vec2 max_sum;
            const vec4 total = combined(tile, used, item, used, vec4(0.0), max_sum);
            finish(token, head0, item, total, max_sum);
        }
    }
    arrive();
}

#version 450
// Attention of a sequence to itself, and its gradients, by cooperative matrices of f16 with f32 sums. Four kernels in one source, which differ
// in the rows that a workgroup owns and those that it walks:
//
//   KIND         own rows   walks       makes
//   0 forward    queries    keys        y = P V, and the log-sum-exp of every row
//   1 dQ         queries    keys        dS K
//   2 dK         keys       queries     dS^T Q, for each head of Q separately
//   3 dV         keys       queries     P^T dY, likewise
//
// with P = exp(score - lse) and dS = P (dY V^T - delta) score'.
//
//   binding 0  own x (Q or K), binding 1  own y (dY or V; unused, any buffer, for KIND 0 and 3), binding 2  walked x (K or Q), binding 3
//              walked y (V or dY): F16 as attention/train/train_pack.comp makes them, in 16-byte words; the factors of the heads follow at the end
//   binding 4  lse F32 [sequences, n, n_head]
//   binding 5  delta F32 [sequences, n, n_head], dy . y; unused, any buffer, for KIND 0 and 3
//   binding 6  the result F32 [sequences, n, n_head, HD or VD]
//
// A workgroup takes FM own rows of a head for each of its subgroups: rows along x, heads along y, sequences along z. The subgroups walk
// together: ROWS rows of x and y lie in shared memory, padded against bank conflicts, while the next ones are prefetched into registers. For
// each FN of them a subgroup makes scores S = X X^T [FM x FN] and, where dS is needed, Y Y^T. The elements become weights or derivatives in
// f16, pass through shared memory to become a matrix A, and multiply Y or X. The driver decides which elements a lane holds; a matrix of
// position numbers, loaded at the start, tells row and column of each. The forward kernel walks twice, first for the log-sum-exp alone: each
// element keeps its own running maximum and sum, so that no sum is rescaled on the way.
//
// FN = FK, and SG divides FM * FN. No defines; everything is a specialization constant.
#include "gemm/matrix.glsl"
#include "elementwise/functions.glsl"
layout(constant_id = 5) const uint HD = 128;   // values of a head of Q and K
layout(constant_id = 6) const uint VD = 128;   // values of a head of V
layout(constant_id = 7) const uint ROWS = 32;  // rows walked at a time, a multiple of FN
layout(constant_id = 8) const uint KIND = 0;  // as above

layout(push_constant) uniform Push {
    uint n;          // tokens of a sequence
    uint rows;       // n padded to whole matrices
    uint n_head;
    uint n_head_kv;
    uint sequences;
    uint causal;     // 0: every token sees its whole sequence
    uint window;     // most tokens that a token sees; 0: no limit
    float scale;
    float softcap;   // 0: none
} p;

layout(std430, set = 0, binding = 0) readonly buffer OwnX { uvec4 own_x[]; };
layout(std430, set = 0, binding = 0) readonly buffer OwnXFactors { float own_x_factors[]; };
layout(std430, set = 0, binding = 1) readonly buffer OwnY { uvec4 own_y[]; };
layout(std430, set = 0, binding = 1) readonly buffer OwnYFactors { float own_y_factors[]; };
layout(std430, set = 0, binding = 2) readonly buffer WalkX { uvec4 walk_x[]; };
layout(std430, set = 0, binding = 2) readonly buffer WalkXFactors { float walk_x_factors[]; };
layout(std430, set = 0, binding = 3) readonly buffer WalkY { uvec4 walk_y[]; };
layout(std430, set = 0, binding = 3) readonly buffer WalkYFactors { float walk_y_factors[]; };
layout(std430, set = 0, binding = 4) buffer Lse { float lse[]; };
layout(std430, set = 0, binding = 5) readonly buffer Delta { float delta[]; };
layout(std430, set = 0, binding = 6) writeonly buffer Out { float result[]; };

#define MATRIX_WEIGHT coopmat<float16_t, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

const bool FORWARD = KIND == 0, WITH_DS = KIND == 1 || KIND == 2, OWN_KEYS = KIND >= 2;
const uint OUT = WITH_DS ? HD : VD;               // values of a result row
const uint SUBGROUPS = WG / SG;
const uint NK = HD / FK, NV = VD / FK, NO = OUT / FN;
const uint ELEMENTS = FM * FN / SG;               // of a sum matrix, per lane
const uint X_PITCH = HD / 8 + 1, Y_PITCH = VD / 8 + 1, W_PITCH = FN / 8 + 1;  // 16-byte words from row to row
const uint SUM_PITCH = FN / 4;
const uint X_THREAD_WORDS = (ROWS * HD / 8 + WG - 1) / WG, Y_THREAD_WORDS = (ROWS * VD / 8 + WG - 1) / WG;
const float MASKED = -3.0e38;

shared uvec4 x_rows[ROWS * X_PITCH];
shared uvec4 y_rows[ROWS * Y_PITCH];
shared float walked_lse[ROWS];
shared float walked_delta[ROWS];
shared uvec4 weights[SUBGROUPS * FM * W_PITCH];
shared vec4 numbers[SUBGROUPS * FM * SUM_PITCH];      // a sum matrix per subgroup
shared float of_row[SUBGROUPS * FM];

uint group_first, first, head, kv_head, sequence;  // first own row of the workgroup, and of the subgroup
float x_factor, y_factor;
MATRIX_SUM element_positions;                     // of each element: row * FN + column
MATRIX_A own_xs[NK];
MATRIX_A own_ys[WITH_DS ? NV : 1];
float own_lse[ELEMENTS];
float own_delta[ELEMENTS];
uvec4 x_prefetch[X_THREAD_WORDS];
uvec4 y_prefetch[Y_THREAD_WORDS];

uint row_of(uint i) { return uint(element_positions[i]) / FN; }
uint column_of(uint i) { return uint(element_positions[i]) % FN; }

// Stores a sum matrix in shared memory, for threads to read by row and column.
uint stage_matrix(MATRIX_SUM sums) {
    const uint stage = gl_SubgroupID * FM * SUM_PITCH;
    coopMatStore(sums, numbers, stage, SUM_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    return stage;
}
float number_at(uint stage, uint row, uint column) { return numbers[stage + row * SUM_PITCH + column / 4u][column % 4u]; }

void find_element_positions() {
    const uint stage = gl_SubgroupID * FM * SUM_PITCH;
    for (uint i = gl_SubgroupInvocationID; i < FM * SUM_PITCH; i += SG) numbers[stage + i] = 4.0 * float(i) + vec4(0.0, 1.0, 2.0, 3.0);
    subgroup_sync();
    coopMatLoad(element_positions, numbers, stage, SUM_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
}

// First word of row `row` of this head's Q (keys: of its K or V), with `dim` values to a row; and the place of the head's factor.
uint word_at(bool keys, uint row, uint dim) {
    return (((keys ? sequence * p.n_head_kv + kv_head : sequence * p.n_head + head)) * p.rows + row) * (dim / 8u);
}
uint factor_at(bool keys, uint dim) {
    const uint heads = keys ? p.n_head_kv : p.n_head;
    return 4u * (p.sequences * heads * p.rows * (dim / 8u)) + sequence * heads + (keys ? kv_head : head);
}
uint token_at(uint i) { return (sequence * p.n + min(i, p.n - 1u)) * p.n_head + head; }

// The score of a dot product, scaled and soft-capped; and the slope of the soft cap at a score.
float score(float product) {
    const float s = product * x_factor * p.scale;
    return p.softcap == 0.0 ? s : p.softcap * tanh_exact(s / p.softcap);
}
float score_derivative(float s) { return p.softcap == 0.0 ? 1.0 : 1.0 - (s / p.softcap) * (s / p.softcap); }

// Whether the own row sees the walked one or, for own keys, is seen by it.
bool visible(uint own, uint walked) {
    const uint i = OWN_KEYS ? walked : own, j = OWN_KEYS ? own : walked;
    return i < p.n && j < p.n && (p.causal == 0u || (j <= i && (p.window == 0u || j + p.window > i)));
}

// Whether that holds for any pair of `count` own rows from `own` on and `others` walked rows from `walked` on.
bool any_visible(uint own, uint count, uint walked, uint others) {
    const uint i = OWN_KEYS ? walked : own, i_end = i + (OWN_KEYS ? others : count), j = OWN_KEYS ? own : walked, j_end = j + (OWN_KEYS ? count : others);
    return i < p.n && j < p.n && (p.causal == 0u || (j < i_end && (p.window == 0u || j_end - 1u + p.window > i)));
}

void fetch(uint tile, bool both) {
    [[unroll]] for (uint i = 0; i < X_THREAD_WORDS; i++) {
        const uint word = i * WG + gl_LocalInvocationID.x, row = min(tile * ROWS + word / (HD / 8), p.rows - 1u);
        x_prefetch[i] = walk_x[word_at(!OWN_KEYS, row, HD) + word % (HD / 8)];
    }
    if (both)
        [[unroll]] for (uint i = 0; i < Y_THREAD_WORDS; i++) {
            const uint word = i * WG + gl_LocalInvocationID.x, row = min(tile * ROWS + word / (VD / 8), p.rows - 1u);
            y_prefetch[i] = walk_y[word_at(!OWN_KEYS, row, VD) + word % (VD / 8)];
        }
}

void put(uint tile, bool both) {
    [[unroll]] for (uint i = 0; i < X_THREAD_WORDS; i++) {
        const uint word = i * WG + gl_LocalInvocationID.x;
        if (ROWS * HD / 8 % WG == 0 || word < ROWS * HD / 8) x_rows[word / (HD / 8) * X_PITCH + word % (HD / 8)] = x_prefetch[i];
    }
    if (both)
        [[unroll]] for (uint i = 0; i < Y_THREAD_WORDS; i++) {
            const uint word = i * WG + gl_LocalInvocationID.x;
            if (ROWS * VD / 8 % WG == 0 || word < ROWS * VD / 8) y_rows[word / (VD / 8) * Y_PITCH + word % (VD / 8)] = y_prefetch[i];
        }
    if (OWN_KEYS)
        for (uint i = gl_LocalInvocationID.x; i < ROWS; i += WG) {
            walked_lse[i] = lse[token_at(tile * ROWS + i)];
            if (WITH_DS) walked_delta[i] = delta[token_at(tile * ROWS + i)] / y_factor;
        }
}

MATRIX_SUM products_x(uint j) {
    MATRIX_SUM s = MATRIX_SUM(0.0);
    [[unroll]] for (uint d = 0; d < NK; d++) {
        MATRIX_B b;
        coopMatLoad(b, x_rows, j * FN * X_PITCH + d * FK / 8, X_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
        s = coopMatMulAdd(own_xs[d], b, s);
    }
    return s;
}

MATRIX_SUM products_y(uint j) {
    MATRIX_SUM s = MATRIX_SUM(0.0);
    if (WITH_DS)
        [[unroll]] for (uint d = 0; d < NV; d++) {
            MATRIX_B b;
            coopMatLoad(b, y_rows, j * FN * Y_PITCH + d * FK / 8, Y_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            s = coopMatMulAdd(own_ys[d], b, s);
        }
    return s;
}

// The log-sum-exp of the own rows, into own_lse and to memory.
void find_lse(uint begin, uint end) {
    float score_max[ELEMENTS], weight_sums[ELEMENTS];
    [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
        score_max[i] = MASKED;
        weight_sums[i] = 0.0;
    }
    fetch(begin, false);
    for (uint tile = begin; tile < end; tile++) {
        barrier();
        put(tile, false);
        barrier();
        fetch(min(tile + 1u, end - 1u), false);
        [[unroll]] for (uint j = 0; j < ROWS / FN; j++) {
            const uint walked = tile * ROWS + j * FN;
            if (!any_visible(first, FM, walked, FN)) continue;
            const MATRIX_SUM s = products_x(j);
            [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
                const float at = visible(first + row_of(i), walked + column_of(i)) ? score(s[i]) : MASKED;
                const float less = exp_bounded(-abs(at - score_max[i]));
                if (at > score_max[i]) weight_sums[i] = weight_sums[i] * less + 1.0;
                else if (at != MASKED) weight_sums[i] += less;
                score_max[i] = max(score_max[i], at);
            }
        }
    }
    const uint rows = gl_SubgroupID * FM;
    MATRIX_SUM m;
    [[unroll]] for (uint i = 0; i < ELEMENTS; i++) m[i] = score_max[i];
    uint stage = stage_matrix(m);
    for (uint r = gl_SubgroupInvocationID; r < FM; r += SG) {
        float top = MASKED;
        for (uint c = 0u; c < FN; c++) top = max(top, number_at(stage, r, c));
        of_row[rows + r] = top;
    }
    subgroup_sync();
    [[unroll]] for (uint i = 0; i < ELEMENTS; i++) m[i] = weight_sums[i] * exp_bounded(score_max[i] - of_row[rows + row_of(i)]);
    stage = stage_matrix(m);
    for (uint r = gl_SubgroupInvocationID; r < FM; r += SG) {
        float total = 0.0;
        for (uint c = 0u; c < FN; c++) total += number_at(stage, r, c);
        of_row[rows + r] += log(total);
        if (first + r < p.n) lse[token_at(first + r)] = of_row[rows + r];
    }
    subgroup_sync();
    [[unroll]] for (uint i = 0; i < ELEMENTS; i++) own_lse[i] = of_row[rows + row_of(i)];
    barrier();
}

void main() {
    group_first = gl_WorkGroupID.x * SUBGROUPS * FM;
    first = group_first + gl_SubgroupID * FM;
    head = gl_WorkGroupID.y;
    kv_head = head / (p.n_head / p.n_head_kv);
    sequence = gl_WorkGroupID.z;
    find_element_positions();
    const float walk_x_factor = walk_x_factors[factor_at(!OWN_KEYS, HD)], walk_y_factor = walk_y_factors[factor_at(!OWN_KEYS, VD)];
    x_factor = own_x_factors[factor_at(OWN_KEYS, HD)] * walk_x_factor;
    y_factor = WITH_DS ? own_y_factors[factor_at(OWN_KEYS, VD)] * walk_y_factor : 1.0;
    const uint own = min(first, p.rows - FM);
    [[unroll]] for (uint d = 0; d < NK; d++)
        coopMatLoad(own_xs[d], own_x, word_at(OWN_KEYS, own, HD) + d * FK / 8, HD / 8, gl_CooperativeMatrixLayoutRowMajor);
    if (WITH_DS)
        [[unroll]] for (uint d = 0; d < NV; d++)
            coopMatLoad(own_ys[d], own_y, word_at(OWN_KEYS, own, VD) + d * FK / 8, VD / 8, gl_CooperativeMatrixLayoutRowMajor);
    // Tiles that this workgroup walks.
    const uint group_end = min(group_first + SUBGROUPS * FM, p.n);
    uint begin = 0u, end = (p.n + ROWS - 1u) / ROWS;
    if (p.causal != 0u && !OWN_KEYS) {
        end = (group_end + ROWS - 1u) / ROWS;
        if (p.window != 0u && group_first + 1u > p.window) begin = (group_first + 1u - p.window) / ROWS;
    }
    if (p.causal != 0u && OWN_KEYS) {
        begin = group_first / ROWS;
        if (p.window != 0u) end = (min(group_end - 1u + p.window, p.n) + ROWS - 1u) / ROWS;
    }
    if (FORWARD) find_lse(begin, end);
    else if (!OWN_KEYS)
        [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
            own_lse[i] = lse[token_at(first + row_of(i))];
            own_delta[i] = delta[token_at(first + row_of(i))] / y_factor;
        }
    MATRIX_SUM sums[NO];
    [[unroll]] for (uint d = 0; d < NO; d++) sums[d] = MATRIX_SUM(0.0);
    fetch(begin, true);
    for (uint tile = begin; tile < end; tile++) {
        barrier();
        put(tile, true);
        barrier();
        fetch(min(tile + 1u, end - 1u), true);
        [[unroll]] for (uint j = 0; j < ROWS / FN; j++) {
            const uint walked = tile * ROWS + j * FN;
            if (!any_visible(first, FM, walked, FN)) continue;
            const MATRIX_SUM s = products_x(j), dy_v = products_y(j);
            MATRIX_WEIGHT w;
            [[unroll]] for (uint i = 0; i < ELEMENTS; i++) {
                const uint c = j * FN + column_of(i);
                const float at = score(s[i]), total = OWN_KEYS ? walked_lse[c] : own_lse[i];
                float v = visible(first + row_of(i), tile * ROWS + c) ? exp_bounded(at - total) : 0.0;
                if (WITH_DS) v *= (dy_v[i] - (OWN_KEYS ? walked_delta[c] : own_delta[i])) * score_derivative(at);
                w[i] = float16_t(v);
            }
            const uint stage = gl_SubgroupID * FM * W_PITCH;
            MATRIX_A a;
            coopMatStore(w, weights, stage, W_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            subgroup_sync();
            coopMatLoad(a, weights, stage, W_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            subgroup_sync();
            [[unroll]] for (uint d = 0; d < NO; d++) {
                MATRIX_B b;
                if (WITH_DS) coopMatLoad(b, x_rows, j * FN * X_PITCH + d * FN / 8, X_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                else coopMatLoad(b, y_rows, j * FN * Y_PITCH + d * FN / 8, Y_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                sums[d] = coopMatMulAdd(a, b, sums[d]);
            }
        }
    }
    const float factor = WITH_DS ? p.scale * y_factor * walk_x_factor : walk_y_factor;
    [[unroll]] for (uint d = 0; d < NO; d++) {
        const uint stage = stage_matrix(sums[d] * factor);
        for (uint i = gl_SubgroupInvocationID; i < FM * FN; i += SG)
            if (first + i / FN < p.n) result[token_at(first + i / FN) * OUT + d * FN + i % FN] = number_at(stage, i / FN, i % FN);
        subgroup_sync();
    }
}

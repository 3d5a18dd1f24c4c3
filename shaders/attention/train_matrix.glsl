// Attention of texts to themselves by cooperative matrices of f16 with f32 sums: what the kernels of training have in common.
//
// Packed operands: attention/train_pack.comp, words of 16 bytes, whose last words have the factors. FN = FK: weights that came as sums become matrices A.
//
// A subgroup takes FM queries (or keys) of a head: tiles along x, WARPS of them a workgroup, heads along y, texts along z. It reads matrices straight from
// memory. Which row and column an element of a matrix has is the driver's affair: a matrix of such numbers, loaded at the start, says it.
#include "mat_mul/matrix.glsl"
layout(constant_id = 5) const uint HD = 128;  // values of a head of Q and K
layout(constant_id = 6) const uint VD = 128;  // and of V
#include "elementwise/functions.glsl"

layout(push_constant) uniform Push {
    uint n;          // tokens of a text
    uint rows;       // with those that fill it up to whole matrices
    uint n_head;
    uint n_head_kv;
    uint texts;
    uint causal;     // 0: every token sees its whole text
    uint window;     // tokens that a token sees at most; 0: no bound
    float scale;
    float softcap;   // 0: none
} p;

#define MATRIX_WEIGHT coopmat<float16_t, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

const uint WARPS = WG / SG;
const uint NK = HD / FK, NV = VD / FK;           // matrices along a row
const uint ELEMENTS = FM * FN / SG;              // of a matrix of sums, a lane
const uint W_PITCH = FN / 8 + 1;                 // words of 16 bytes from row to row of weights
const uint NUMBER_PITCH = FN / 4;

shared uvec4 weights[WARPS * FM * W_PITCH];
shared vec4 numbers[WARPS * FM * NUMBER_PITCH];  // floats of a tile of sums

uint first, head, kv_head, text;                 // the first query or key of the subgroup
MATRIX_SUM places;                               // of the elements: row * FN + column

void find_places() {
    first = (gl_WorkGroupID.x * WARPS + gl_SubgroupID) * FM;
    head = gl_WorkGroupID.y;
    kv_head = head / (p.n_head / p.n_head_kv);
    text = gl_WorkGroupID.z;
    const uint stage = gl_SubgroupID * FM * NUMBER_PITCH;
    for (uint i = gl_SubgroupInvocationID; i < FM * NUMBER_PITCH; i += SG) numbers[stage + i] = vec4(4u * i, 4u * i + 1u, 4u * i + 2u, 4u * i + 3u);
    subgroup_sync();
    coopMatLoad(places, numbers, stage, NUMBER_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
}

// First word of row `row` of a head among `heads`, whose rows have `dim` values; and the head's factor.
uint word_at(uint number, uint heads, uint row, uint dim) { return ((text * heads + number) * p.rows + row) * (dim / 8u); }
uint factor_at(uint number, uint heads, uint dim) { return 4u * (p.texts * heads * p.rows * (dim / 8u)) + text * heads + number; }

bool visible(uint i, uint j) {
    return i < p.n && j < p.n && (p.causal == 0u || (j <= i && (p.window == 0u || j + p.window > i)));
}

// Scaled and capped, and its derivative by what it is made of, without `scale`.
float score(float product) {
    const float s = product * p.scale;
    return p.softcap == 0.0 ? s : p.softcap * tanh_exact(s / p.softcap);
}
float score_slope(float s) { return p.softcap == 0.0 ? 1.0 : 1.0 - (s / p.softcap) * (s / p.softcap); }

// Tiles of FN keys that the FM queries from `first` on see, and of FN queries that see the FM keys from it on.
uint first_keys() { return p.causal != 0u && p.window != 0u && first + 1u > p.window ? (first + 1u - p.window) / FN : 0u; }
uint end_keys() { return ((p.causal != 0u ? min(first + FM, p.n) : p.n) + FN - 1u) / FN; }
uint first_queries() { return p.causal != 0u ? first / FN : 0u; }
uint end_queries() { return ((p.causal != 0u && p.window != 0u ? min(first + FM - 1u + p.window, p.n) : p.n) + FN - 1u) / FN; }

// Weights of f16 as a matrix A.
MATRIX_A turned_weights(MATRIX_WEIGHT w) {
    const uint stage = gl_SubgroupID * FM * W_PITCH;
    MATRIX_A a;
    coopMatStore(w, weights, stage, W_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    coopMatLoad(a, weights, stage, W_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    return a;
}

// A tile of sums in shared memory, for threads to read by row and column.
uint stage_sums(MATRIX_SUM sums) {
    const uint stage = gl_SubgroupID * FM * NUMBER_PITCH;
    coopMatStore(sums, numbers, stage, NUMBER_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    return stage;
}

float staged(uint stage, uint row, uint column) { return numbers[stage + row * NUMBER_PITCH + column / 4u][column % 4u]; }

// Stores FN columns of this subgroup's rows to a tensor [texts, n, heads, dim], from `column` of the head on.
#define STORE_SUMS(SUMS, BUFFER, DIM, COLUMN) {                                                                          \
        const uint stage = stage_sums(SUMS);                                                                             \
        for (uint i = gl_SubgroupInvocationID; i < FM * FN; i += SG)                                                     \
            if (first + i / FN < p.n)                                                                                    \
                BUFFER[((text * p.n + first + i / FN) * p.n_head + head) * DIM + COLUMN + i % FN] = staged(stage, i / FN, i % FN); \
        subgroup_sync();                                                                                                 \
    }

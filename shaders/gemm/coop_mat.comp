#version 450
// GEMM by cooperative matrices: Y = X W^T, with W [m][k] quantized, decoded to f16 on the way, X f16 and sums f32. Dense or grouped by
// experts (MUL_MAT_ID). With TRANSPOSED, Y = X W: the gradient with respect to the activations, dX = dY W.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x F16, packed (gemm/matrix.glsl): x_stride 16-byte words per row or, with FRAGMENTS, per FN columns;
//              padded to whole column tiles
//   binding 2  y F32 [tokens or slots][y_stride values]; or F16, packed as x (y_stride likewise); or, Y_PARTIAL, F32 [parts][n][y_stride]
//   binding 3  bias F32, binding 4 residual F32, binding 5 route: as in gemm/iface.glsl
//   binding 6  overflow word of an F16 y (gemm/overflow.glsl); otherwise unused, any buffer
// With COLUMN_FACTORS binding 3 is F32 [n]: factors of the columns of Y, which undo the scaling with which the rows of x were packed.
//
// A workgroup makes a tile of TILE_M weight rows by TILE_N columns (tokens); each subgroup makes a SUBGROUP_M x SUBGROUP_N part of it, as
// matrices of FM x FN. It walks K in steps of STEP_K. In each step the threads decode one unit of 32 weights each into f16 rows in shared
// memory, padded against bank conflicts and double buffered, so that one barrier per step is enough; the units of the step after next are
// loaded into registers meanwhile. Activations come from memory straight into registers as fragments (FRAGMENTS),
// or else through shared memory like the weights.
//
// TRANSPOSED: the tile's "rows" are then positions along the stored rows of W, p.m of them, and sums run over its p.k rows. Threads decode
// units as before, now TILE_M / 32 of each of the STEP_K rows of a step, which lie in shared memory in K order; matrices are loaded column by
// column. The values of a unit stay in K order, so the epilogue swaps the middle two of every four back.
//
// Epilogue: each subgroup stages its part in shared memory, FN columns at a time, so that a thread gets neighbouring rows of one column. Bias,
// GLU and residual are applied there, and f16 outputs become fragments through a second staging.
// Groups of FN columns without a token are not stored.
//
// Defines: QUANT_FILE. Everything else is a specialization constant.
#include "gemm/matrix.glsl"

layout(constant_id = 5) const uint TILE_M = 128;  // weight rows of a tile
layout(constant_id = 6) const uint TILE_N = 128;  // columns of a tile
layout(constant_id = 7) const uint SUBGROUP_M = 64;  // rows of a subgroup's part
layout(constant_id = 8) const uint SUBGROUP_N = 64;  // columns of a subgroup's part
layout(constant_id = 9) const uint STEP_K = 32;  // values along K per step, a multiple of 32
layout(constant_id = 10) const uint FRAGMENTS = 1;  // 1: x is packed as fragments, 0: row-major
layout(constant_id = 11) const uint GROUPED = 0;  // 1: columns are slots of experts
layout(constant_id = 12) const uint HAS_BIAS = 0;
layout(constant_id = 13) const uint HAS_RESIDUAL = 0;
layout(constant_id = 14) const uint GLU = 0;  // as in gemm/glu.glsl
layout(constant_id = 15) const uint Y_TYPE = 0;   // Y_*
layout(constant_id = 16) const float GLU_ALPHA = 1.0;
layout(constant_id = 17) const float GLU_LIMIT = 1.0;
layout(constant_id = 18) const uint TRANSPOSED = 0;  // 1: Y = X W
layout(constant_id = 19) const uint COLUMN_FACTORS = 0;  // 1: binding 3 holds a factor per column

#define Y_F32 0u
#define Y_PACKED 1u     // F16, row-major
#define Y_FRAGMENTS 2u
#define Y_PARTIAL 3u    // F32 sums of one part of K (split-K)

#define PATH_INT 0
#define DECODES_F16
#include "quant/weights.glsl"
#include "gemm/iface.glsl"
#include "quant/place.glsl"
#include QUANT_FILE
#include "gemm/tile.glsl"
#include "gemm/glu.glsl"
#include "gemm/pack.glsl"
#include "gemm/unit_f16.glsl"
#define OVERFLOW_BINDING 6
#include "gemm/overflow.glsl"

layout(std430, set = 0, binding = 1) readonly buffer X { uvec4 x4[]; };
layout(std430, set = 0, binding = 2) buffer Y { float y1[]; };
layout(std430, set = 0, binding = 2) buffer YPairs { uvec2 y2[]; };
layout(std430, set = 0, binding = 2) buffer YQuads { uvec4 y4[]; };
layout(std430, set = 0, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, set = 0, binding = 3) readonly buffer ColumnFactors { float column_factor[]; };
layout(std430, set = 0, binding = 4) readonly buffer Residual { float residual[]; };

const uint SUBGROUPS_N = TILE_N / SUBGROUP_N;  // subgroups side by side along the columns
const uint MS = SUBGROUP_M / FM, NS = SUBGROUP_N / FN;  // matrices of a subgroup's part, along rows and columns
const uint STEP_UNITS = STEP_K / 32;
const uint STEP_ROW_UNITS = TRANSPOSED != 0 ? TILE_M / 32 : STEP_UNITS;  // units of a row that a step reads
const uint PITCH = STEP_K / 8 + 1;            // 16-byte words from row to row
const uint W_PITCH = 4 * STEP_ROW_UNITS + 1;
const uint W_WORDS = (TRANSPOSED != 0 ? STEP_K : TILE_M) * W_PITCH, X_WORDS = TILE_N * PITCH;
const uint THREAD_UNITS = (TILE_M * STEP_UNITS + WG - 1) / WG;  // units that a thread decodes per step
const uint THREAD_X_WORDS = FRAGMENTS != 0 ? 1 : (TILE_N * STEP_K / 8 + WG - 1) / WG;
const uint CHUNKS = STEP_K / FK;              // matrices along K per step
const uint PREFETCH_CHUNKS = 2;               // chunks by which fragments are loaded ahead of their use
const uint FRAGMENT_COUNT = FRAGMENTS != 0 ? PREFETCH_CHUNKS * NS : 1;
const uint STAGE_PITCH = SUBGROUP_M / 4 + 1;
const uint STAGE_WORDS = FN * STAGE_PITCH;    // per subgroup
const uint ALL_STAGES = WG / SG * STAGE_WORDS;

shared uvec4 w_rows[2 * W_WORDS > ALL_STAGES ? 2 * W_WORDS : ALL_STAGES];
shared uvec4 x_rows[FRAGMENTS != 0 ? 1 : 2 * X_WORDS];

MATRIX_SUM sums[MS * NS];
UnitRaw raw[THREAD_UNITS];
uvec4 x_words[THREAD_X_WORDS];
uvec4 fragments[FRAGMENT_COUNT];

uint part_m, part_n;  // where this subgroup's part begins within the tile

// Piece i of this thread is unit unit_column(i) of row unit_row(i) of the tile in this step. Neighbouring threads have neighbouring units.
uint unit_row(uint i) { return (i * WG + gl_LocalInvocationID.x) / STEP_ROW_UNITS; }
uint unit_column(uint i) { return (i * WG + gl_LocalInvocationID.x) % STEP_ROW_UNITS; }

// Where a row of a step lies in shared memory: TRANSPOSED in K order.
uint slot_of(uint row) { return TRANSPOSED != 0 ? (row & ~3u) | (row & 1u) << 1 | (row >> 1 & 1u) : row; }

void fetch_weights(uint i, uint unit) {
    if (TRANSPOSED != 0)  // past the last row x is zero
        raw[i] = unit_load(place(min(32u * unit + unit_row(i), p.k - 1u), min(tile_row / 32u + unit_column(i), p.w.units - 1u)));
    else raw[i] = unit_load(place(tile_matrix + min(tile_row + unit_row(i), p.m - 1u), min(unit + unit_column(i), end_unit - 1u)));
}

void put_unit(UnitRaw unit, uint at, bool valid) {
    uvec4 words[4];
    unit_f16(unit, valid, words);
    [[unroll]] for (uint i = 0; i < 4; i++) w_rows[at + i] = words[i];
}

// A step of several units may reach past the end of a row; units there become zeros.
void put_weights(uint i, uint buf, uint unit) {
    if (TILE_M * STEP_UNITS % WG == 0 || i * WG + gl_LocalInvocationID.x < TILE_M * STEP_UNITS)
        put_unit(raw[i], buf * W_WORDS + slot_of(unit_row(i)) * W_PITCH + 4 * unit_column(i),
                 STEP_UNITS == 1 || unit + (TRANSPOSED != 0 ? unit_row(i) / 32 : unit_column(i)) < end_unit);
}

// Activations through shared memory.
void fetch_x_rows(uint unit) {
    if (FRAGMENTS != 0) return;
    [[unroll]] for (uint i = 0; i < THREAD_X_WORDS; i++) {
        const uint item = i * WG + gl_LocalInvocationID.x, c = min(item / (STEP_K / 8), TILE_N - 1), word = item % (STEP_K / 8);
        x_words[i] = x4[(tile_number * TILE_N + c) * p.x_stride + min(unit * 4u + word, end_unit * 4u - 1u)];
    }
}

void put_x_rows(uint buf) {
    if (FRAGMENTS != 0) return;
    [[unroll]] for (uint i = 0; i < THREAD_X_WORDS; i++) {
        const uint item = i * WG + gl_LocalInvocationID.x, c = item / (STEP_K / 8), word = item % (STEP_K / 8);
        if (TILE_N * STEP_K / 8 % WG == 0 || c < TILE_N) x_rows[buf * X_WORDS + c * PITCH + word] = x_words[i];
    }
}

// Activations as fragments. chunk: position along K in units of FK.
void fetch_fragments(uint slot, uint chunk) {
    if (FRAGMENTS == 0) return;
    const uint block = min(chunk, end_unit * (32u / FK) - 1u);
    [[unroll]] for (uint j = 0; j < NS; j++)
        fragments[slot * NS + j] = x4[((tile_number * TILE_N + part_n) / FN + j) * p.x_stride + block * SG + gl_SubgroupInvocationID];
}

// The products of the step at `unit`. Meanwhile the weights of the next step are decoded into the other buffer, and those of the step after it
// are loaded, as are fragments. Weights are decoded after the matrices were loaded and before they are multiplied: the compiler can then
// interleave decoding with multiplications, but could not move a store to shared memory ahead of a load.
void multiply(uint buf, uint unit) {
    [[unroll]] for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        MATRIX_A a[MS];
        [[unroll]] for (uint i = 0; i < MS; i++) {
            if (TRANSPOSED != 0)
                coopMatLoad(a[i], w_rows, buf * W_WORDS + chunk * FK * W_PITCH + (part_m + i * FM) / 8, W_PITCH,
                            gl_CooperativeMatrixLayoutColumnMajor);
            else
                coopMatLoad(a[i], w_rows, buf * W_WORDS + (part_m + i * FM) * W_PITCH + chunk * FK / 8, W_PITCH,
                            gl_CooperativeMatrixLayoutRowMajor);
        }
        MATRIX_B b[NS];
        [[unroll]] for (uint j = 0; j < NS; j++) {
            if (FRAGMENTS != 0) b[j] = from_fragment(fragments[chunk % PREFETCH_CHUNKS * NS + j]);
            else coopMatLoad(b[j], x_rows, buf * X_WORDS + (part_n + j * FN) * PITCH + chunk * FK / 8, PITCH,
                             gl_CooperativeMatrixLayoutColumnMajor);
        }
        fetch_fragments(chunk % PREFETCH_CHUNKS, unit * (32u / FK) + chunk + PREFETCH_CHUNKS);
        [[unroll]] for (uint i = 0; i < THREAD_UNITS; i++)
            if (i * CHUNKS / THREAD_UNITS == chunk) {
                put_weights(i, buf ^ 1, unit + STEP_UNITS);
                fetch_weights(i, unit + 2 * STEP_UNITS);
            }
        if (chunk == 0) {
            put_x_rows(buf ^ 1);
            fetch_x_rows(unit + 2 * STEP_UNITS);
        }
        [[unroll]] for (uint j = 0; j < NS; j++)
            [[unroll]] for (uint i = 0; i < MS; i++) sums[i * NS + j] = coopMatMulAdd(a[i], b[j], sums[i * NS + j]);
    }
}

// Four neighbouring output rows of a column, from the sums staged at `at`. row: the first one, within the tile.
vec4 apply_epilogue(uint at, uint row, uint column) {
    vec4 v[2];
    const uint quads = GLU != 0 ? 2 : 1, matrix_row = tile_row + row;
    const float y_scale = UNIT_F16_SCALE * p.y_scale, factor = COLUMN_FACTORS != 0 ? y_scale * column_factor[column] : y_scale;
    [[unroll]] for (uint i = 0; i < quads; i++) {
        v[i] = factor * uintBitsToFloat(w_rows[at + i]);
        if (TRANSPOSED != 0) v[i] = v[i].xzyw;
        if (HAS_BIAS != 0 && Y_TYPE != Y_PARTIAL)
            [[unroll]] for (uint e = 0; e < 4; e++) v[i][e] += bias[p.w_row0 + tile_matrix + min(matrix_row + 4u * i + e, p.m - 1u)];
    }
    if (GLU != 0) return vec4(glu(v[0].x, v[0].y), glu(v[0].z, v[0].w), glu(v[1].x, v[1].y), glu(v[1].z, v[1].w));
    if (HAS_RESIDUAL != 0 && Y_TYPE != Y_PARTIAL)
        [[unroll]] for (uint e = 0; e < 4; e++)
            if (matrix_row + e < p.m) v[0][e] += residual[column * p.y_stride + p.y_offset + matrix_row + e];
    return v[0];
}

const uint OUT_SHIFT = GLU != 0 ? 1 : 0;
const uint OUT_QUADS = SUBGROUP_M >> (2 + OUT_SHIFT);  // in a column of a subgroup's part
const uint OUT_PITCH = (OUT_QUADS + 1) / 2 + 1;    // of the second staging, f16
const uint ITEMS = (FN * OUT_QUADS + SG - 1) / SG;   // groups of four outputs, per lane

void store_four(uint column, uint row, vec4 v) {
    const uint rows = p.m >> OUT_SHIFT;
    if (row >= rows) return;
    const uint at = (Y_TYPE == Y_PARTIAL ? gl_WorkGroupID.z * p.n + column : column) * p.y_stride + p.y_offset + row;
    if ((at & 3u) == 0u && row + 3u < rows) y4[at >> 2] = floatBitsToUint(v);
    else
        [[unroll]] for (uint e = 0; e < 4; e++)
            if (row + e < rows) y1[at + e] = v[e];
}

// Stages and stores FN columns of this subgroup's part. first: the first of them, within the tile.
void store_columns(uint j, uint first) {
    const uint stage = gl_SubgroupID * STAGE_WORDS, lane = gl_SubgroupInvocationID;
    const uint out_row = (tile_row + part_m) >> OUT_SHIFT, rows = p.m >> OUT_SHIFT;
    [[unroll]] for (uint i = 0; i < MS; i++)
        coopMatStore(sums[i * NS + j], w_rows, stage + i * FM / 4, STAGE_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
    subgroup_sync();
    uvec2 packed[ITEMS];
    [[unroll]] for (uint i = 0; i < ITEMS; i++) {
        const uint item = i * SG + lane, c = item / OUT_QUADS, quad = item % OUT_QUADS;
        const bool valid = first + c < tile_count && (FN * OUT_QUADS % SG == 0 || c < FN);
        const uint column = valid ? column_of(first + c) : 0u;
        vec4 v = vec4(0.0);
        if (valid) v = apply_epilogue(stage + c * STAGE_PITCH + (quad << OUT_SHIFT), part_m + ((4 * quad) << OUT_SHIFT), column);
        if (Y_TYPE == Y_F32 || Y_TYPE == Y_PARTIAL) {
            if (valid) store_four(column, out_row + 4 * quad, v);
        } else {
            // Outputs past the last row pad the last unit with zeros.
            [[unroll]] for (uint e = 0; e < 4; e++) v[e] = out_row + 4 * quad + e < rows ? p.out_scale * v[e] : 0.0;
            packed[i] = pack_four(track_overflow(v));
            if (Y_TYPE == Y_PACKED && valid && p.y_offset + out_row + 4 * quad < 8u * p.y_stride)
                y2[(tile_number * TILE_N + first + c) * 2u * p.y_stride + (p.y_offset + out_row) / 4u + quad] = packed[i];
        }
    }
    subgroup_sync();
    if (Y_TYPE != Y_FRAGMENTS) return;
    [[unroll]] for (uint i = 0; i < ITEMS; i++) {
        const uint item = i * SG + lane, c = item / OUT_QUADS, quad = item % OUT_QUADS;
        if (FN * OUT_QUADS % SG == 0 || c < FN) {
            w_rows[stage + c * OUT_PITCH + quad / 2][2 * (quad & 1)] = packed[i].x;
            w_rows[stage + c * OUT_PITCH + quad / 2][2 * (quad & 1) + 1] = packed[i].y;
        }
    }
    subgroup_sync();
    [[unroll]] for (uint k = 0; k < 4 * OUT_QUADS; k += FK) {
        const uint block = (p.y_offset + out_row + k) / FK;
        if (block * SG < p.y_stride && first < tile_count) {
            MATRIX_B b;
            coopMatLoad(b, w_rows, stage + k / 8, OUT_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            y4[((tile_number * TILE_N + first) / FN) * p.y_stride + block * SG + lane] = to_fragment(b);
        }
    }
    subgroup_sync();
}

void store_part() {
    // Every subgroup visits all its columns, even with nothing to store:
    // a CPU driver may make the whole workgroup wait at a subgroup's barrier.
    [[unroll]] for (uint j = 0; j < NS; j++) store_columns(j, part_n + j * FN);
    if (Y_TYPE == Y_PACKED || Y_TYPE == Y_FRAGMENTS) report_overflow();
}

void main() {
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, WG);
#endif
    if (!find_tile()) return;
    if (TRANSPOSED != 0) end_unit = min(first_unit + p.split_units, (p.k + 31u) / 32u);
    part_m = gl_SubgroupID / SUBGROUPS_N * SUBGROUP_M;
    part_n = gl_SubgroupID % SUBGROUPS_N * SUBGROUP_N;
    [[unroll]] for (uint i = 0; i < THREAD_UNITS; i++) fetch_weights(i, first_unit);
    fetch_x_rows(first_unit);
    [[unroll]] for (uint i = 0; i < PREFETCH_CHUNKS; i++) fetch_fragments(i, first_unit * (32u / FK) + i);
    [[unroll]] for (uint i = 0; i < MS * NS; i++) sums[i] = MATRIX_SUM(0.0);
#ifdef UNIT_TABLE
    barrier();
#endif
    [[unroll]] for (uint i = 0; i < THREAD_UNITS; i++) {
        put_weights(i, 0, first_unit);
        fetch_weights(i, first_unit + STEP_UNITS);
    }
    put_x_rows(0);
    fetch_x_rows(first_unit + STEP_UNITS);
    barrier();
    uint buf = 0;
    [[dont_unroll]] for (uint unit = first_unit; unit < end_unit; unit += STEP_UNITS) {
        multiply(buf, unit);
        barrier();
        buf ^= 1;
    }
    if (Y_TYPE == Y_F32 && HAS_BIAS == 0 && HAS_RESIDUAL == 0 && GLU == 0 && GROUPED == 0 && TRANSPOSED + COLUMN_FACTORS == 0 &&
        tile_row + TILE_M <= p.m && tile_count == TILE_N) {
        // A whole tile without epilogue: store straight from the matrices.
        [[unroll]] for (uint i = 0; i < MS * NS; i++)
            coopMatStore(sums[i] * (UNIT_F16_SCALE * p.y_scale), y1,
                         (tile_column + part_n + i % NS * FN) * p.y_stride + p.y_offset + tile_row + part_m + i / NS * FM, p.y_stride,
                         gl_CooperativeMatrixLayoutColumnMajor);
        return;
    }
    store_part();
}

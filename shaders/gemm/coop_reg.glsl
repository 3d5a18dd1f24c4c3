// The product of gemm/coop_reg.comp, gemm/coop_reg_heads.comp and gemm/coop_reg_experts.comp: Y = X W^T for few tokens, by cooperative matrices, with the weights
// decoded in registers. Like a GEMV, it is bound by memory bandwidth. So it keeps many loads of weights in flight, and uses neither shared
// memory nor barriers until its sums are complete.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x F16 in unit order (gemm/units.glsl), x_stride 16-byte words per FN columns
//   binding 3  bias F32, binding 5 route (BY_EXPERTS), else unused: as in gemm/iface.glsl
//   binding 6  F32 [n][X_SQUARES], with X_SQUARES: x is y of a product with NEXT_NORM, and each of its columns is divided by its rms
//   bindings 7 to 9  arrivals (ARRIVES), arrivals of x (EXPECTED), state of spin-waits (common/arrivals.glsl); BY_EXPERTS 11: arrivals of the
//                    route (EXPECTED_FIRST)
//
// A binding that a kernel does not need may be any buffer.
//
// A workgroup makes a tile of ROW_SUBGROUPS * SUBGROUP_M weight rows by TILE_N columns (tokens). Each subgroup takes SUBGROUP_M rows, all
// columns, and every K_SUBGROUPS-th step along K (sliced-K). A step is LANE_UNITS blocks (gemm/units.glsl). A lane loads whole units of 32
// weights and decodes them to f16; neighbouring lanes load neighbouring units of a row. Thanks to unit order, what a lane decodes are exactly
// its own elements of matrices A. As soon as registers of weights and of x are free, they are loaded for the subgroup's next step. At the end
// the sums of all slices go to shared memory, PASS_N columns at a time, and the thread that stores a value adds them in a fixed order.
//
// X_PART: of more than some 16 columns, x takes most of the L2 cache's bandwidth, since each subgroup reads all of it, and most of the
// registers. With X_PART the workgroup reads x once for all its rows, a part of a block at a time, into shared memory: one part is
// multiplied while the next one is stored there and the one after that is under way. A barrier stands between parts.
//
// The shader that includes this says what becomes of the sums, by four functions that every thread calls, and which rows of the weight a tile has:
//   load_first()         before the wait for x
//   load_with_x()        after it, before the products
//   load_after()         after the products, which leave no registers for what is loaded earlier
//   store_tile()         once `stages` holds the sums of all subgroups for pass_count columns of the tile, from pass_first on
//   weight_row(row)      the row of the weight that is row `row` of the product
//
// BY_EXPERTS 1: a grouped product (MUL_MAT_ID). A tile has slots of one expert, by a route, and a lane looks up where the columns that it holds
// elements of lie in x. x is that of tokens or of slots, in whatever order of columns; its matrices may have other columns (X_FN) than those here.
// The route is read before the wait for x: it is waited for first, by a counter of its own (EXPECTED_FIRST), unless it is older. With TILES_EACH
// a workgroup makes so many row tiles of the same slots, one after the other: as a subgroup ends one, it loads the first weights of the next.
//
// Defines: QUANT_FILE. Before it: gemm/matrix.glsl, and OUT_SHIFT: 1 if two rows of weights make one of the output, else 0. Everything else
// is a specialization constant.
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

#ifndef BY_EXPERTS
#define BY_EXPERTS 0
#endif

layout(constant_id = 5) const uint SUBGROUP_M = 32;  // weight rows of a subgroup
layout(constant_id = 6) const uint TILE_N = 16;  // columns of a tile, a multiple of FN
layout(constant_id = 7) const uint ROW_SUBGROUPS = 1;  // subgroups side by side along the rows; the others share out K
layout(constant_id = 8) const uint ROW_LANES = 4;  // as in gemm/matrix.glsl
layout(constant_id = 9) const uint HAS_BIAS = 0;
layout(constant_id = 10) const uint LANE_UNITS = 1;  // units of a row that a lane decodes per step
layout(constant_id = 11) const uint K_ALIGNED = 0;  // 1: a step is 8 units, and rows are whole steps
layout(constant_id = 12) const uint ARRIVES = 0;  // common/arrivals.glsl
layout(constant_id = 13) const uint EXPECTED = 0;  // likewise
layout(constant_id = 14) const uint X_SQUARES = 0;  // sums of squares per column of x, a multiple of 4; 0: x is not normed here
layout(constant_id = 15) const float EPS = 0.0;  // of the norm of x
layout(constant_id = 17) const uint PASS_N = 16;  // columns of a tile that are stored at a time
#if !BY_EXPERTS
layout(constant_id = 18) const uint X_PART = 0;  // words of a lane and matrix column of x in a part, a divisor of BLOCK_WORDS; 0: x goes straight into registers
#else
const uint X_PART = 0;
#endif
#if BY_EXPERTS
layout(constant_id = 30) const uint TILES_EACH = 1;  // row tiles of a workgroup
#else
const uint TILES_EACH = 1;
#endif
const uint TILE_M = ROW_SUBGROUPS * SUBGROUP_M, GROUPED = BY_EXPERTS;

#define PATH_INT 0
#define DECODES_F16
#include "quant/weights.glsl"
#include "gemm/iface.glsl"
#define UNITS_ALIGNED K_ALIGNED
#include "quant/place.glsl"
#include QUANT_FILE
#if BY_EXPERTS
layout(constant_id = 19) const uint EXPECTED_FIRST = 0;  // arrivals of the route (common/arrivals.glsl)
uint route_zero = 0;
#define ROUTE_ZERO route_zero
#define BIND_FIRST 11
#endif
#include "gemm/tile.glsl"
#include "gemm/pack.glsl"
#include "gemm/unit_f16.glsl"
#include "gemm/units.glsl"
#define BIND_ARRIVALS 7
#define BIND_EXPECTED 8
#define BIND_SYNC_STATE 9
#include "common/arrivals.glsl"

layout(std430, set = 0, binding = 1) readonly buffer X { uvec4 x4[]; };
#if BY_EXPERTS
layout(constant_id = 16) const uint X_FN = 8;  // columns of the matrices that x was packed for
layout(std430, set = 0, binding = 1) readonly buffer XPairs { uvec2 x2[]; };
layout(std430, set = 0, binding = 1) readonly buffer XHalves { float16_t x_half[]; };
#endif
layout(std430, set = 0, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, set = 0, binding = 6) readonly buffer XSquares { vec4 x_squares[]; };

const uint K_SUBGROUPS = WG / SG / ROW_SUBGROUPS;
const uint MS = SUBGROUP_M / FM, NS = TILE_N / FN;
const uint OWN_ROWS = FM / ROW_GROUPS;             // rows of a matrix that a lane holds elements of
const uint UNITS = MS * OWN_ROWS;                  // units that a lane decodes per block
const uint MATRICES = 32 / LANE_VALUES;            // matrices along K per block
#if UNIT_HEADS
const bool PAIRED = K_ALIGNED != 0 && LANE_UNITS == 2 && TILE_N <= 8;  // a lane's two units have one head between them
#endif
const uint STAGE_PITCH = SUBGROUP_M / 4 + 1;
const uint STAGE_WORDS = PASS_N * STAGE_PITCH;     // sums of one subgroup
const uint ALL_STAGES = ROW_SUBGROUPS * K_SUBGROUPS * STAGE_WORDS;
const uint PART_ROWS = K_SUBGROUPS * NS * X_PART;  // of SG words: a part of x, of all slices
const uint ROWS_EACH = (PART_ROWS + WG / SG - 1) / (WG / SG);  // rows of a part that a subgroup loads

// Sums, slices of the same rows side by side. Before them, with X_PART, the bits of two parts of x.
shared vec4 stages[ALL_STAGES > 2 * PART_ROWS * SG ? ALL_STAGES : 2 * PART_ROWS * SG];

MATRIX_SUM sums[MS * NS];
UnitRaw raw[LANE_UNITS * UNITS];
uvec4 x[X_PART != 0 ? ROWS_EACH : NS * BLOCK_WORDS];  // with X_PART what is under way to shared memory
uint steps, blocks;
uint pass_first = 0, pass_count;
uint x_zero = 0;  // a 0 that the compiler cannot know before x has arrived (common/arrivals.glsl)

float16_t half_at(uvec4 word, uint i) {
    const f16vec2 pair = unpackFloat2x16(word[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
}

uint weight_row(uint row);

// Unit `u` of a step, from this lane's row number i.
UnitRaw fetch_unit(uint i, uint u, uint first_row, uint step) {
    uint row = weight_row(min(first_row + i / OWN_ROWS * FM + i % OWN_ROWS * ROW_GROUPS + gl_SubgroupInvocationID / ROW_LANES, p.m - 1u));
#if BY_EXPERTS
    row += tile_matrix;
#endif
    const uint lane = gl_SubgroupInvocationID % ROW_LANES;
    if (K_ALIGNED != 0 && LANE_UNITS == 2) return unit_load(Place(row, min(step, steps - 1u) * 8u + 2u * lane, 0u, u));
    return unit_load(place(row, min(unit_of(step * LANE_UNITS + u, lane, blocks), end_unit - 1u)));
}

// Loads unit `u` of a step, from this lane's row number i. With PAIRED the first unit keeps the head for both, and gets the next one once the
// second is decoded. Which part of it is a unit's does not depend on the step, so the shifts for that are found once.
void load_unit(uint i, uint u, uint first_row, uint step) {
    const uint own = i * LANE_UNITS + u;
    UnitRaw unit = fetch_unit(i, u, first_row, step);
#if UNIT_HEADS
    if (PAIRED) {
        unit.sub = gl_SubgroupInvocationID % ROW_LANES * 2u;
        unit.odd = u;
        if (u == 0) unit.head = raw[own].head;
        else raw[own - 1].head = unit.head;
    }
#endif
    raw[own] = unit;
}

UnitRaw loaded_unit(uint i, uint u) {
    UnitRaw unit = raw[i * LANE_UNITS + u];
#if UNIT_HEADS
    if (PAIRED) unit.head = raw[i * LANE_UNITS].head;
#endif
    return unit;
}

// Activations of few tokens have less than a GiB. With this mask the compiler sees that no address wraps at 32 bits, and puts constant offsets
// into the loads.
const uint MAX_X_INDEX = 0x03ffffffu;

#if BY_EXPERTS
const uint X_OWN_COLUMNS = X_FN / ROW_GROUPS, X_BLOCK_WORDS = 4 * X_OWN_COLUMNS;
const bool X_ALIKE = X_FN == FN && OWN_COLUMNS == 1;  // a word of x as it is packed is one of the kernel's

// Of the columns that this lane holds elements of: the matrix column of x that has it, and its place among the columns of a lane there.
uint x_first[NS * OWN_COLUMNS], x_place[NS * OWN_COLUMNS];

// Columns past the last one of the tile are those of the first.
void find_columns() {
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < NS * OWN_COLUMNS; i++) {
        const uint c = i / OWN_COLUMNS * FN + i % OWN_COLUMNS * ROW_GROUPS + lane / ROW_LANES;
        const uint row = x_row_of(column_of(c < tile_count ? c : 0u));
        x_first[i] = row / X_FN * p.x_stride + row % ROW_GROUPS * ROW_LANES + lane % ROW_LANES;
        x_place[i] = row % X_FN / ROW_GROUPS * LANE_VALUES;
    }
}

// Number of value `number` of a lane's block, as x is packed, of the column that it has in matrix column n.
uint number_in_x(uint n, uint number) {
    return number / (OWN_COLUMNS * LANE_VALUES) * (X_OWN_COLUMNS * LANE_VALUES) + x_place[n * OWN_COLUMNS + number / LANE_VALUES % OWN_COLUMNS] +
           number % LANE_VALUES;
}

// Word i of block u of a step, in matrix column n.
void fetch_x(uint n, uint i, uint step, uint u) {
    uint block = step * LANE_UNITS + u;
    if (K_ALIGNED == 0) block = min(block, blocks - 1u);
    const uint first = block * (X_BLOCK_WORDS * SG) + x_zero;
    uvec4 word;
    if (X_ALIKE) word = x4[((x_first[n] + first) & MAX_X_INDEX) + i * SG];
    else if (LANE_VALUES % 4 == 0)
        [[unroll]] for (uint q = 0; q < 2; q++) {
            const uint column = n * OWN_COLUMNS + (8 * i + 4 * q) / LANE_VALUES % OWN_COLUMNS, number = number_in_x(n, 8 * i + 4 * q);
            const uvec2 pair = x2[2u * (x_first[column] + first + number / 8u * SG) + number % 8u / 4u];
            word[2 * q] = pair.x;
            word[2 * q + 1] = pair.y;
        }
    else
        [[unroll]] for (uint q = 0; q < 4; q++) {
            f16vec2 pair;
            [[unroll]] for (uint e = 0; e < 2; e++) {
                const uint column = n * OWN_COLUMNS + (8 * i + 2 * q + e) / LANE_VALUES % OWN_COLUMNS, number = number_in_x(n, 8 * i + 2 * q + e);
                pair[e] = x_half[8u * (x_first[column] + first + number / 8u * SG) + number % 8u];
            }
            word[q] = packFloat2x16(pair);
        }
    x[n * BLOCK_WORDS + i] = word;
}

uint x_squares_row(uint c) { return x_row_of(column_of(c)); }
#define BIAS_ROW(row) (tile_matrix + (row))
#else
// Word i of block u of a step, in matrix column n. Lanes whose column is past the last one read what the lanes of the first column read, which
// saves memory traffic.
void fetch_x(uint n, uint i, uint step, uint u) {
    uint block = step * LANE_UNITS + u;
    if (K_ALIGNED == 0) block = min(block, blocks - 1u);
    const uint lane = gl_SubgroupInvocationID, used = n * FN + lane / ROW_LANES < tile_count ? lane : lane % ROW_LANES;
    const uint first = (tile_number * NS + n) * p.x_stride + block * (BLOCK_WORDS * SG) + used + x_zero;
    x[n * BLOCK_WORDS + i] = x4[(first & MAX_X_INDEX) + i * SG];
}

#define x_squares_row(c) (tile_column + (c))
#define BIAS_ROW(row) (p.w_row0 + (row))

const uint PART_WORDS = X_PART != 0 ? X_PART : 1, BLOCK_PARTS = X_PART != 0 ? BLOCK_WORDS / PART_WORDS : 1;

// Loads this subgroup's share of part number `part` of x: of a block of each slice. Past the last block x is zero.
void fetch_part(uint part) {
    const uint step = part / (LANE_UNITS * BLOCK_PARTS) * K_SUBGROUPS, block_part = part % BLOCK_PARTS, lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < ROWS_EACH; i++) {
        const uint row = gl_SubgroupID + i * (WG / SG), slice = row / (NS * PART_WORDS), n = row / PART_WORDS % NS;
        const uint block = (step + slice) * LANE_UNITS + part / BLOCK_PARTS % LANE_UNITS;
        if (row >= PART_ROWS || block >= blocks) {
            x[i] = uvec4(0u);
            continue;
        }
        const uint first = (tile_number * NS + n) * p.x_stride + block * (BLOCK_WORDS * SG) + lane + x_zero;
        x[i] = x4[(first & MAX_X_INDEX) + (block_part * PART_WORDS + row % PART_WORDS) * SG];
    }
}

void store_part(uint part) {
    [[unroll]] for (uint i = 0; i < ROWS_EACH; i++) {
        const uint row = gl_SubgroupID + i * (WG / SG);
        if (PART_ROWS % (WG / SG) == 0 || row < PART_ROWS)
            stages[(part % 2u * PART_ROWS + row) * SG + gl_SubgroupInvocationID] = uintBitsToFloat(x[i]);
    }
}

// The products of one step with X_PART. Weights are decoded a part at a time, which saves registers.
void multiply_parts(uint first_row, uint slice, uint turn) {
    [[unroll]] for (uint u = 0; u < LANE_UNITS; u++)
        [[unroll]] for (uint block_part = 0; block_part < BLOCK_PARTS; block_part++) {
            const uint part = (turn * LANE_UNITS + u) * BLOCK_PARTS + block_part;
            store_part(part + 1u);
            fetch_part(part + 2u);
            uvec4 w[UNITS * 4];
            [[unroll]] for (uint i = 0; i < UNITS; i++) {
                uvec4 words[4];
                unit_f16(loaded_unit(i, u), true, words);
                [[unroll]] for (uint j = 0; j < 4 / BLOCK_PARTS; j++) w[i * 4 + j] = words[block_part * (4 / BLOCK_PARTS) + j];
                if (block_part + 1 == BLOCK_PARTS) load_unit(i, u, first_row, turn * K_SUBGROUPS + slice + K_SUBGROUPS);
            }
            const uint word_matrices = 8 / (OWN_COLUMNS * LANE_VALUES);
            [[unroll]] for (uint word = 0; word < X_PART; word++)
                [[unroll]] for (uint n = 0; n < NS; n++) {
                    const uint row = part % 2u * PART_ROWS + (slice * NS + n) * PART_WORDS + word;
                    const uvec4 bits = floatBitsToUint(stages[row * SG + gl_SubgroupInvocationID]);
                    [[unroll]] for (uint j = 0; j < word_matrices; j++) {
                        MATRIX_B b;
                        [[unroll]] for (uint e = 0; e < OWN_COLUMNS * LANE_VALUES; e++) b[e] = half_at(bits, j * OWN_COLUMNS * LANE_VALUES + e);
                        [[unroll]] for (uint i = 0; i < MS; i++) {
                            MATRIX_A a;
                            [[unroll]] for (uint r = 0; r < OWN_ROWS; r++)
                                [[unroll]] for (uint e = 0; e < LANE_VALUES; e++) {
                                    const uint value = (word * word_matrices + j) * LANE_VALUES + e;
                                    a[r * LANE_VALUES + e] = half_at(w[(i * OWN_ROWS + r) * 4 + value / 8], value % 8);
                                }
                            sums[i * NS + n] = coopMatMulAdd(a, b, sums[i * NS + n]);
                        }
                    }
                }
            barrier();
        }
}
#endif

// Whether this is the last step of the subgroup's in a tile that has another one behind it, whose first step is `slice`.
bool next_tile = false;

bool leaves_tile(uint step) { return TILES_EACH > 1 && next_tile && step + K_SUBGROUPS >= steps; }

// The products of one step. Registers of weights and of x are reloaded for later steps after their last use.
void multiply(uint first_row, uint step, uint slice) {
    const bool leaves = leaves_tile(step);
    const uint row_after = leaves ? first_row + TILE_M : first_row, step_after = leaves ? slice : step + K_SUBGROUPS;
    [[unroll]] for (uint u = 0; u < LANE_UNITS; u++) {
        const bool last = u + 1 == LANE_UNITS;
        const uint next_step = last ? min(step_after, steps - 1u) : step, next_unit = last ? 0 : u + 1;
        const bool valid = LANE_UNITS == 1 || K_ALIGNED != 0 || step * LANE_UNITS + u < blocks;
        [[unroll]] for (uint i = 0; i < MS; i++) {
            uvec4 w[OWN_ROWS * 4];
            [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
                uvec4 words[4];
                unit_f16(loaded_unit(i * OWN_ROWS + r, u), valid, words);  // past the end of a row x is zero
                [[unroll]] for (uint j = 0; j < 4; j++) w[r * 4 + j] = words[j];
                load_unit(i * OWN_ROWS + r, u, row_after, step_after);
            }
            [[unroll]] for (uint j = 0; j < MATRICES; j++) {
                MATRIX_A a;
                [[unroll]] for (uint r = 0; r < OWN_ROWS; r++)
                    [[unroll]] for (uint e = 0; e < LANE_VALUES; e++)
                        a[r * LANE_VALUES + e] = half_at(w[r * 4 + (j * LANE_VALUES + e) / 8], (j * LANE_VALUES + e) % 8);
                [[unroll]] for (uint n = 0; n < NS; n++) {
                    MATRIX_B b;
                    [[unroll]] for (uint e = 0; e < OWN_COLUMNS * LANE_VALUES; e++) {
                        const uint number = j * OWN_COLUMNS * LANE_VALUES + e;
                        b[e] = half_at(x[n * BLOCK_WORDS + number / 8], number % 8);
                    }
                    sums[i * NS + n] = coopMatMulAdd(a, b, sums[i * NS + n]);
                    const uint used = (j + 1) * OWN_COLUMNS * LANE_VALUES;  // values of x
                    if (i + 1 == MS && used % 8 == 0) fetch_x(n, used / 8 - 1, next_step, next_unit);
                }
            }
        }
    }
}

// The sums of PASS_N columns, those of pass number `pass`.
void stage_sums(uint stage, uint pass) {
    [[unroll]] for (uint i = 0; i < MS; i++)
        [[unroll]] for (uint n = 0; n < PASS_N / FN; n++)
            coopMatStore(sums[i * NS + pass * (PASS_N / FN) + n], stages, stage * STAGE_WORDS + n * FN * STAGE_PITCH + i * FM / 4, STAGE_PITCH,
                         gl_CooperativeMatrixLayoutColumnMajor);
}

// Sums of four neighbouring rows of column c of this pass, over all slices in order. row: the first one, within the tile.
vec4 sum_slices(uint row, uint c) {
    vec4 v = vec4(0.0);
    [[unroll]] for (uint slice = 0; slice < K_SUBGROUPS; slice++)
        v += stages[(row / SUBGROUP_M * K_SUBGROUPS + slice) * STAGE_WORDS + c * STAGE_PITCH + row % SUBGROUP_M / 4u];
    return v;
}

const uint OUT_QUADS = TILE_M >> (2 + OUT_SHIFT);

shared float column_factors[TILE_N];

// Where columns are few, their factors are found ahead of the products, while the first x is under way. Otherwise the sums of squares would
// take too many registers, and are loaded after the products.
const bool FACTORS_FIRST = TILE_N <= 8;

// Finds 1 / rms of each column of x. The sums of squares are loaded all at once.
void find_column_factors() {
    const uint subgroups = WG / SG, each = (TILE_N + subgroups - 1u) / subgroups, quads = X_SQUARES / 4u;
    const uint lane_quads = X_SQUARES != 0 ? (quads + SG - 1u) / SG : 1u;  // GLSL has no empty arrays
    vec4 parts[each * lane_quads];
    [[unroll]] for (uint i = 0; i < each * lane_quads; i++) {
        const uint c = gl_SubgroupID + i / lane_quads * subgroups, quad = i % lane_quads * SG + gl_SubgroupInvocationID;
        const bool valid = c < tile_count && quad < quads;
        parts[i] = valid ? x_squares[x_squares_row(c) * quads + quad + x_zero] : vec4(0.0);
    }
    [[unroll]] for (uint j = 0; j < each; j++) {
        vec4 sum = vec4(0.0);
        [[unroll]] for (uint i = 0; i < lane_quads; i++) sum += parts[j * lane_quads + i];
        const float square = subgroupAdd((sum.x + sum.y) + (sum.z + sum.w));
        const uint c = gl_SubgroupID + j * subgroups;
        if (gl_SubgroupInvocationID == 0u && c < tile_count) column_factors[c] = inversesqrt(square / float(p.k) + EPS);
    }
}

// Sums of four neighbouring weight rows, complete but for a residual. row: the first one, within the tile; c: the column, within the tile.
vec4 finished_sums(uint row, uint c) {
    vec4 v = UNIT_F16_SCALE * (X_SQUARES != 0 ? p.y_scale * column_factors[c] : p.y_scale) * sum_slices(row, c - pass_first);
    if (HAS_BIAS != 0)
        [[unroll]] for (uint e = 0; e < 4; e++) v[e] += bias[BIAS_ROW(weight_row(min(tile_row + row + e, p.m - 1u)))];
    return v;
}

// The first four rows that this thread stores are those of item gl_LocalInvocationID.x: `row` within the whole product, of column `column`.
struct FirstItem {
    bool exists;
    uint row, column;
};

FirstItem first_item() {
    const uint item = gl_LocalInvocationID.x;
    return FirstItem(item < min(tile_count, PASS_N) * OUT_QUADS, tile_row + item % OUT_QUADS * 4u, tile_column + item / OUT_QUADS);
}

void load_first();
void load_with_x();
void load_after();
void store_tile();

void clear_sums() {
    [[unroll]] for (uint i = 0; i < MS * NS; i++) sums[i] = MATRIX_SUM(0.0);
}

void store_passes() {
    [[unroll]] for (uint pass = 0; pass < TILE_N / PASS_N; pass++) {
        pass_first = pass * PASS_N;
        pass_count = min(tile_count - min(pass_first, tile_count), PASS_N);
        if (pass != 0) barrier();
        stage_sums(gl_SubgroupID, pass);
        barrier();
        store_tile();
    }
}

void main() {
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, WG);
    barrier();
#endif
#if BY_EXPERTS
    route_zero = wait_for_first();
#endif
    if (!find_tile()) {
        arrive();
        return;
    }
    tile_row *= TILES_EACH;
    const uint row_subgroup = gl_SubgroupID / K_SUBGROUPS, slice = gl_SubgroupID % K_SUBGROUPS;
    const uint first_row = tile_row + row_subgroup * SUBGROUP_M;
    blocks = (end_unit + ROW_LANES - 1u) / ROW_LANES;
    steps = (blocks + LANE_UNITS - 1u) / LANE_UNITS;
    [[unroll]] for (uint i = 0; i < UNITS; i++)
        [[unroll]] for (uint u = 0; u < LANE_UNITS; u++) load_unit(i, u, first_row, slice);
#if BY_EXPERTS
    find_columns();
#endif
    load_first();
    x_zero = wait_for_arrivals();  // meanwhile the first weights are in flight
#if !BY_EXPERTS
    if (X_PART != 0) {
        fetch_part(0u);
        store_part(0u);
        fetch_part(1u);
    } else
#endif
        [[unroll]] for (uint n = 0; n < NS; n++)
            [[unroll]] for (uint i = 0; i < BLOCK_WORDS; i++) fetch_x(n, i, min(slice, steps - 1u), 0);
    load_with_x();
    if (X_SQUARES != 0 && FACTORS_FIRST) find_column_factors();
#if BY_EXPERTS
    [[dont_unroll]] for (uint tile = 0; tile < TILES_EACH && tile_row < p.m; tile++) {
        next_tile = tile + 1u < TILES_EACH && tile_row + TILE_M < p.m;
        clear_sums();
        const uint row = first_row + tile * TILE_M;
        [[dont_unroll]] for (uint step = slice; step < steps; step += K_SUBGROUPS) multiply(row, step, slice);
        load_after();
        if (X_SQUARES != 0 && !FACTORS_FIRST && tile == 0u) find_column_factors();
        if (tile != 0u) barrier();
        store_passes();
        tile_row += TILE_M;
    }
#else
    clear_sums();
    if (X_PART != 0) {
        barrier();
        const uint turns = (steps + K_SUBGROUPS - 1u) / K_SUBGROUPS;  // the same for all slices, as barriers ask
        [[dont_unroll]] for (uint turn = 0; turn < turns; turn++) multiply_parts(first_row, slice, turn);
    } else
        [[dont_unroll]] for (uint step = slice; step < steps; step += K_SUBGROUPS) multiply(first_row, step, slice);
    load_after();
    if (X_SQUARES != 0 && !FACTORS_FIRST) find_column_factors();
    store_passes();
#endif
    arrive();
}

#version 450
// GEMV: y[token][row] = sum over column of W[row][column] * x[token][column], for 1 to COLS tokens. W [m rows][k columns] is quantized.
// One kernel serves every weight type, float and integer dot products (MMVQ), dense weights and MUL_MAT_ID. Bindings: gemv/iface.glsl.
//
// A GEMV is bound by the bandwidth of memory, so everything serves one end: keep loads of weights in flight, and do little work per weight.
//
// How the work is divided:
//   unit       32 consecutive weights of a row; a row has K_UNITS of them
//   row group  LANES neighbouring threads that share ROWS rows (register blocking: x is read once for all of them)
//   chunk      the LANES * UNROLL units of a row that a row group reads in one step, UNROLL per lane
//   tile       the SLOTS * ROWS rows of a workgroup of WG threads
// Each lane walks its rows chunk by chunk and keeps ROWS * COLS partial sums in registers. At the end the sums of a row group's lanes are added in
// a fixed order, and the epilogue (gemv/epilogue.glsl) finishes and stores the rows. With LOOP_TILES 0 a workgroup computes one tile. With
// LOOP_TILES 1 it loops over tiles with the stride of the grid, so that one prologue serves them all.
//
// Defines, besides WG LANES ROWS UNROLL COLS LOOP_TILES K_UNITS SUBGROUP (its lanes; 1: sums without shuffles):
//   PATH_INT       1: Q8_1 activations and dot products of packed int8; 0: F32 arithmetic
//   X_TYPE         X_F32 or X_Q8_1: x as it is in memory
//   Y_TYPE         Y_F32, or Y_Q8_1: the tile's output rows (a multiple of 32) are quantized before they are stored
//   K_TAIL         1: k is no multiple of 32, so the last unit of x is read value by value
//   PROLOGUE       what is done to x first: PROLOGUE_NONE, PROLOGUE_NORM or PROLOGUE_COPY (gemv/act.glsl)
//   PREFETCH       software prefetch into registers. PREFETCH_WEIGHTS: once a unit has been used, its registers are loaded with the same unit
//                  of the next chunk. PREFETCH_WEIGHTS_X: so are those of x (can_prefetch_x in vkback/ops/matmul/gemv.py)
//   LANES_BLOCKED  0: the UNROLL units of a lane are LANES apart (strided). 1: they are neighbours (blocked), and the scales that they share
//                  are loaded once. UNROLL is then a power of two and K_UNITS a multiple of LANES * UNROLL
//   EXPERTS        EXPERTS_NONE: dense
//                  EXPERTS_EACH: one row of y per token and chosen expert; gl_WorkGroupID.z = token * N_USED + slot
//                  EXPERTS_SUMMED: z = token; the rows of its N_USED experts are walked as one long row, each scaled by its expert's weight
//                  EXPERTS_HEADS: z = token * N_USED + head;
//                  matrix `head` times this head's slice of x (X_UNITS / N_USED units) makes this head's slice of y
//   GLU            1: rows 2i and 2i + 1 of W are gate and up of output row i, y = silu(gate) * up;
//                  with GLU_ALPHA and GLU_LIMIT the clamped form SWIGLU_OAI
//   GELU           1: with GLU, gelu (tanh form) instead of silu; without GLU, y = gelu(row sum + bias)
//   SOFTCAP        without GLU and GELU: the cap of y
//   SQUARED_RELU   without GLU, GELU and SOFTCAP: y = max(row sum + bias, 0) squared
//   TOPK           1: y holds router logits, and the last workgroup to arrive chooses the experts (topk/choose.glsl)
//   CHOOSE         1, with EXPERTS_EACH: every workgroup chooses its token's experts from the router logits; one of them stores ids and weights
//   M_ALIGNED      1: the matrix is a whole number of tiles, so row numbers need no clamp
//   SCALE_SUMS     1, float path, types with unit_ints: multiply x by the integers of a unit and the sum by its scale, instead of every weight
//   LEVEL_TABLE    1 or 2, with SCALE_SUMS: the decoder looks these integers up in shared memory (quant/mxfp4.glsl)
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#if SUBGROUP > 1
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

#define X_F32 0
#define X_Q8_1 1
#define Y_F32 0
#define Y_Q8_1 1
// The order of these words is that of SHADER_WORDS in vkback/ops/matmul/gemv.py.
#define PROLOGUE_NONE 0
#define PROLOGUE_NORM 1
#define PROLOGUE_COPY 2
#define EXPERTS_NONE 0
#define EXPERTS_EACH 1
#define EXPERTS_SUMMED 2
#define EXPERTS_HEADS 3
#define PREFETCH_NONE 0
#define PREFETCH_WEIGHTS 1
#define PREFETCH_WEIGHTS_X 2

layout(local_size_x = WG) in;

#include "quant/weights.glsl"
#include "common/clock.glsl"
#include "common/sentinel.glsl"
#include "gemv/iface.glsl"
#if PATH_INT
#include "common/int_dot.glsl"
#endif
#define CHUNK (LANES * UNROLL)
#if LANES_BLOCKED
#define UNIT_STEP UNROLL
#else
#define UNIT_STEP 1
#endif
#include "quant/place.glsl"
#include QUANT_FILE
#define WG_SIZE WG
#define REDUCE_GROUPS 1
#if PROLOGUE == PROLOGUE_NORM || Y_TYPE == Y_Q8_1 || TOPK || CHOOSE
#include "common/reduce.glsl"
#if Y_TYPE == Y_F32
#define Q8_1_PACK_ONLY
#endif
#include "common/q8_1.glsl"
#endif
#if EXPERTS == EXPERTS_SUMMED
#define WALK_UNITS (N_USED * K_UNITS)
#else
#define WALK_UNITS K_UNITS
#endif
#if EXPERTS == EXPERTS_HEADS
#define X_HEAD_UNITS (X_UNITS / N_USED)
#define Y_OFFSET (p.y_offset + expert_row)
uint x_unit0;     // first unit of this head's slice of x
#else
#define X_UNITS K_UNITS
#define Y_OFFSET p.y_offset
#define x_unit0 0u
#endif
#include "gemv/act.glsl"

#define SLOTS (WG / LANES)
#define PARTIALS (LANES / SUBGROUP)
#define CHUNKS ((WALK_UNITS + CHUNK - 1) / CHUNK)
// X_IN_REGISTERS: a lane keeps its units of x in registers, for all tiles if a row is one chunk. PREFETCH_X: it also prefetches those of the
// next chunk.
#define PREFETCH_X (PREFETCH == PREFETCH_WEIGHTS_X)
#define X_IN_REGISTERS (PREFETCH_X || (CHUNKS == 1 && COLS == 1 && EXPERTS != EXPERTS_SUMMED && PATH_INT))
#define TILE_ROWS (SLOTS * ROWS)
#define TILE_OUT (TILE_ROWS >> GLU)

float acc[ROWS][COLS];

// Row of x for column c. Columns past the last token read the last token again and are not stored.
uint token_row(uint x_row, uint c) {
#if COLS > 1
    return min(x_row + c, p.n - 1u);
#else
    return x_row;
#endif
}

#if PATH_INT
#include "gemv/unit_dot.glsl"
#endif

#if SCALE_SUMS
// The 32 integers of a unit: weight = scale[half] * number - bias[half]. bitfieldExtract rather than `& 0xff` for byte 0: the compiler would
// merge that mask with the decoder's own, and AMD has a one-instruction conversion only for whole bytes (v_cvt_f32_ubyte).
#ifndef UNIT_QUANTS  // otherwise the decoder brings its own
void unit_quants(UnitRaw raw, out vec4 w[8], out vec2 scale, out vec2 bias) {
    uint q[8];
    unit_ints(raw, q, scale, bias);
    [[unroll]] for (int i = 0; i < 8; i++) {
  #if UNIT_SIGNED
        w[i] = vec4(int(q[i] << 24) >> 24, int(q[i] << 16) >> 24, int(q[i] << 8) >> 24, int(q[i]) >> 24);
  #else
        w[i] = vec4(bitfieldExtract(q[i], 0, 8), bitfieldExtract(q[i], 8, 8), bitfieldExtract(q[i], 16, 8), q[i] >> 24);
  #endif
    }
}
#endif

// Sums of the two halves of a unit of x.
vec2 sums_of(Act a) {
    const vec4 low = (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]), high = (a.x[4] + a.x[5]) + (a.x[6] + a.x[7]);
    return vec2((low.x + low.y) + (low.z + low.w), (high.x + high.y) + (high.z + high.w));
}

float dot_quants(vec4 w[8], vec2 scale, vec2 bias, Act a, vec2 x_sums) {
    // Two chains of fma per half, so that fewer of them depend on each other.
    vec2 low = vec2(0.0), high = vec2(0.0);
    [[unroll]] for (int i = 0; i < 4; i++) {
        low = fma(w[i].zw, a.x[i].zw, fma(w[i].xy, a.x[i].xy, low));
        high = fma(w[i + 4].zw, a.x[i + 4].zw, fma(w[i + 4].xy, a.x[i + 4].xy, high));
    }
  #if UNIT_HALVES
    const float products = scale.x * (low.x + low.y) + scale.y * (high.x + high.y);
  #else
    const float products = scale.x * ((low.x + low.y) + (high.x + high.y));
  #endif
  #if UNIT_HALVES && UNIT_BIAS
    return products - dot(bias, x_sums);
  #elif UNIT_BIAS && !defined(UNIT_QUANTS)
    return products - bias.x * (x_sums.x + x_sums.y);
  #else
    return products;
  #endif
}
#endif

#if !PATH_INT
float dot_weights(vec4 w[8], Act a) {
    vec4 sum = vec4(0.0);
    [[unroll]] for (int i = 0; i < 8; i++) sum = fma(w[i], a.x[i], sum);
    return (sum.x + sum.y) + (sum.z + sum.w);
}
#endif

#if !(PATH_INT && COLS == 1)
// acc += weight * (one unit of ROWS rows) * (the same unit of COLS tokens). weight: the expert's, else 1.
void accumulate(UnitRaw raw[ROWS], uint x_row, uint unit, uint unit_offset, float weight) {
#if PATH_INT
    Unit u[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) u[r] = decode_unit(raw[r]);
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        const Act a = act_load(token_row(x_row, c), unit, unit_offset);
        [[unroll]] for (uint r = 0; r < ROWS; r++) acc[r][c] += weight * dot_unit(raw[r], u[r], a);
    }
#else
  #if COLS == 1
    // Row by row, so that registers hold the decoded weights of only one row at a time.
    const Act a = act_load(x_row, unit, unit_offset);
    #if SCALE_SUMS
    const vec2 x_sums = sums_of(a);
    #endif
    [[unroll]] for (int r = 0; r < ROWS; r++) {
        vec4 w[8];
    #if SCALE_SUMS
        vec2 scale, bias;
        unit_quants(raw[r], w, scale, bias);
        acc[r][0] += weight * dot_quants(w, scale, bias, a, x_sums);
    #else
        unit_decode(raw[r], w);
        acc[r][0] += weight * dot_weights(w, a);
    #endif
    }
  #else
    // Token by token: with rows outside, each row would read the same x, and compilers would keep the x of all tokens in registers.
    vec4 w[ROWS][8];
    #if SCALE_SUMS
    vec2 scale[ROWS], bias[ROWS];
    [[unroll]] for (int r = 0; r < ROWS; r++) unit_quants(raw[r], w[r], scale[r], bias[r]);
    #else
    [[unroll]] for (int r = 0; r < ROWS; r++) unit_decode(raw[r], w[r]);
    #endif
    [[unroll]] for (int c = 0; c < COLS; c++) {
        const Act a = act_load(token_row(x_row, c), unit, unit_offset);
    #if SCALE_SUMS
        const vec2 x_sums = sums_of(a);
        [[unroll]] for (int r = 0; r < ROWS; r++) acc[r][c] += weight * dot_quants(w[r], scale[r], bias[r], a, x_sums);
    #else
        [[unroll]] for (int r = 0; r < ROWS; r++) acc[r][c] += weight * dot_weights(w[r], a);
    #endif
    }
  #endif
#endif
}

#endif

#if X_IN_REGISTERS
ActRaw own_x[UNROLL];
#endif
#if EXPERTS == EXPERTS_SUMMED
// Of each chosen expert of the token: the row of W where it begins, and its weight.
shared uint summed_row[N_USED];
shared float summed_weight[N_USED];
#endif
uint first_row;   // first row of this row group's share of the tile, within its matrix
uint expert_row;  // row of W where this matrix begins (not with EXPERTS_SUMMED)
uint x_row;
uint y_row;
uint lane;

#if EXPERTS == EXPERTS_SUMMED
void fetch_experts(uint tid) {
    for (uint e = tid; e < N_USED; e += WG) {
        int id;
        float weight;
        SPIN_UNTIL(id = ids[y_row * N_USED + e]; weight = expert_weight[y_row * N_USED + e], arrived(uint(id)) && arrived(weight))
        summed_row[e] = uint(id) * p.m;
        summed_weight[e] = weight;
    }
    barrier();
}
#endif

// Unit j of a lane's chunk is unit_of(chunk, j) + UNIT_OFFSET(j). The second term is a constant that the compiler folds into the load's
// address. Past the end of a row or of the matrix the last unit is read again, and its product is dropped.
#define IN_ROW(j) (CHUNKS == 1 ? ((j) + 1) * LANES <= K_UNITS : K_UNITS % CHUNK == 0)
#define UNIT_OFFSET(j) (UNIT_STEP > 1 ? (j) : IN_ROW(j) ? (j) * LANES : 0u)

uint unit_of(uint chunk, uint j) {
    const uint first = chunk * CHUNK + lane * UNIT_STEP;
    return IN_ROW(j) ? first : min(first + j * LANES, WALK_UNITS - 1u);
}

// The unit's number within its row, where a walk runs through several rows.
#if EXPERTS == EXPERTS_SUMMED
#define UNIT_IN_ROW(unit) ((unit) % K_UNITS)
#else
#define UNIT_IN_ROW(unit) (unit)
#endif

UnitRaw fetch(uint row, uint r, uint chunk, uint j) {
    const uint unit = unit_of(chunk, j);
#if EXPERTS == EXPERTS_SUMMED
    const uint base = summed_row[unit / K_UNITS];
#else
    const uint base = expert_row;
#endif
#if M_ALIGNED
    return unit_load(Place(base + row, UNIT_IN_ROW(unit), r, UNIT_OFFSET(j)));
#else
    return unit_load(Place(base + min(row + r, p.m - 1u), UNIT_IN_ROW(unit), 0u, UNIT_OFFSET(j)));
#endif
}

void load(out UnitRaw raw[UNROLL][ROWS], uint row, uint chunk) {
    [[unroll]] for (uint j = 0; j < UNROLL; j++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) raw[j][r] = fetch(row, r, chunk, j);
}

// Adds the units of one chunk to the sums. With `reload`, each unit's registers are reloaded with the same unit of the next chunk as soon as it
// has been used (software prefetch): loads stay in flight without more registers.
void multiply_chunk(inout UnitRaw raw[UNROLL][ROWS], uint chunk, bool reload, uint next_row, uint next_chunk) {
    [[unroll]] for (uint j = 0; j < UNROLL; j++) {
        const bool valid = WALK_UNITS % CHUNK == 0 || chunk * CHUNK + j * LANES + lane < WALK_UNITS;
        const uint unit = UNIT_IN_ROW(unit_of(chunk, j));
#if EXPERTS == EXPERTS_SUMMED
        const uint e = unit_of(chunk, j) / K_UNITS;
        const uint row = PROLOGUE == PROLOGUE_COPY ? e : p.x_slots == 1u ? y_row : y_row * N_USED + e;
        const float weight = valid ? summed_weight[e] : 0.0;
#else
        const uint row = PROLOGUE == PROLOGUE_COPY ? 0u : x_row;
        const float weight = 1.0;
#endif
#if PATH_INT && COLS == 1
  #if X_IN_REGISTERS
        const Act a = unpack_act(own_x[j]);
  #else
        const Act a = act_load(row, unit, UNIT_OFFSET(j));
  #endif
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            if (valid) acc[r][0] += weight * dot_unit(raw[j][r], decode_unit(raw[j][r]), a);
            if (reload) raw[j][r] = fetch(next_row, r, next_chunk, j);
        }
  #if PREFETCH_X
        if (reload) own_x[j] = act_fetch(x_row, unit_of(next_chunk, j), UNIT_OFFSET(j));
  #endif
#else
        if (valid) accumulate(raw[j], row, unit, UNIT_OFFSET(j), weight);
        if (reload)
            [[unroll]] for (uint r = 0; r < ROWS; r++) raw[j][r] = fetch(next_row, r, next_chunk, j);
#endif
    }
}

// Walks one tile, chunk by chunk. On entry `raw` holds the tile's first chunk; on return, that of the tile at next_row if there is one.
void walk(inout UnitRaw raw[UNROLL][ROWS], bool has_next, uint next_row) {
#if PREFETCH != PREFETCH_NONE
    for (uint chunk = 0; chunk + 1 < CHUNKS; chunk++) multiply_chunk(raw, chunk, true, first_row, chunk + 1);
    if (has_next) multiply_chunk(raw, CHUNKS - 1, true, next_row, 0);
    else multiply_chunk(raw, CHUNKS - 1, false, 0, 0);
#else
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        multiply_chunk(raw, chunk, false, 0, 0);
        if (chunk + 1 < CHUNKS) load(raw, first_row, chunk + 1);
        else if (has_next) load(raw, next_row, 0);
    }
#endif
}

float total[COLS];  // this subgroup's share of the sum of row `lane % ROWS`
#if PARTIALS > 1
shared float partial[1 + LOOP_TILES][COLS * ROWS * SLOTS * PARTIALS];
#endif

#if SUBGROUP > 1
#define SUM_LANES (LANES < SUBGROUP ? LANES : SUBGROUP)
#define SUM_VALUES ROWS
#include "common/lane_sums.glsl"
#endif

// Adds the partial sums of a row group's lanes: by shuffles within a subgroup, through shared memory across subgroups. `buf` alternates from tile
// to tile (double buffering), so one barrier per tile is enough. The order of additions does not depend on COLS: a token's bits stay the same.
void reduce(uint tid, uint buf) {
#if SUBGROUP > 1
    [[unroll]] for (int c = 0; c < COLS; c++) {
        float v[ROWS];
        [[unroll]] for (int r = 0; r < ROWS; r++) v[r] = acc[r][c];
        total[c] = lane_sums(v, lane);
    }
#elif PARTIALS == 1
    [[unroll]] for (int c = 0; c < COLS; c++) total[c] = acc[0][c];
#endif
#if PARTIALS > 1
    const uint slot = tid / LANES;
    [[unroll]] for (uint c = 0; c < COLS; c++) {
  #if SUBGROUP > 1
        if (lane % SUBGROUP < ROWS) partial[buf][((c * ROWS + lane % SUBGROUP) * SLOTS + slot) * PARTIALS + lane / SUBGROUP] = total[c];
  #else
        [[unroll]] for (uint r = 0; r < ROWS; r++) partial[buf][((c * ROWS + r) * SLOTS + slot) * PARTIALS + lane] = acc[r][c];
  #endif
    }
    barrier();
#endif
}

#if PARTIALS > 1
// Sum of row `r` of this thread's row group.
float row_total(uint tid, uint buf, uint r, uint c) {
    float sum = 0.0;
    const uint base = ((c * ROWS + r) * SLOTS + tid / LANES) * PARTIALS;
    [[unroll]] for (uint i = 0; i < PARTIALS; i++) sum += partial[buf][base + i];
    return sum;
}
#endif

#include "gemv/epilogue.glsl"

#if TOPK
#define LOGIT(token, e) y1[e]
#include "common/ticket.glsl"
#include "topk/choose.glsl"
#elif CHOOSE
#define LOGIT(token, e) router_logits[e]
#include "topk/choose.glsl"
#endif

#if CHOOSE && SPINS
bool logits_arrived() {
    bool valid = true;
    [[unroll]] for (int j = 0; j < LOGITS_EACH; j++) valid = valid && arrived(own_logits[j]);
    return valid;
}
#endif

#if X_IN_REGISTERS
void fetch_own_x() {
    [[unroll]] for (uint j = 0; j < UNROLL; j++) own_x[j] = act_fetch(PROLOGUE == PROLOGUE_COPY ? 0u : x_row, unit_of(0u, j), UNIT_OFFSET(j));
}
#endif

void main() {
    const uint tid = gl_LocalInvocationIndex;
    const uint groups = gl_NumWorkGroups.x * gl_NumWorkGroups.y;
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint tiles = (p.m + TILE_ROWS - 1) / TILE_ROWS;
    if (group >= tiles) return;
    MARK(MARK_BEGIN);
    const uint slot_row = (tid / LANES) * ROWS;
    lane = tid % LANES;
    first_row = group * TILE_ROWS + slot_row;
    expert_row = 0;
#if EXPERTS == EXPERTS_EACH
  #if CHOOSE
    // Slice z = 0 has no rows: its first workgroup stores the choice.
    // That takes as long as a slice's GEMV, so it would delay any other slice.
    if (gl_WorkGroupID.z == 0) {
        if (group > 0) return;
        SPIN_UNTIL(fetch_logits(tid, 0u), logits_arrived());
        choose_experts(tid);
        store_chosen(tid, 0u, TOPK_SCALE);
        return;
    }
    y_row = gl_WorkGroupID.z - 1u;
  #else
    y_row = gl_WorkGroupID.z;
    SPIN_UNTIL(const int expert = ids[y_row]; expert_row = uint(expert) * p.m, arrived(uint(expert)));
  #endif
    x_row = p.x_slots == 1u ? y_row / N_USED : y_row;
#elif EXPERTS == EXPERTS_HEADS
    y_row = x_row = gl_WorkGroupID.z / N_USED;
    const uint head = gl_WorkGroupID.z % N_USED;
    expert_row = head * p.m;
    x_unit0 = head * X_HEAD_UNITS;
#elif EXPERTS == EXPERTS_SUMMED
    y_row = gl_WorkGroupID.z;
    x_row = y_row * p.x_slots;
    fetch_experts(tid);
#else
    y_row = gl_WorkGroupID.z * COLS;
    x_row = y_row;
#endif

    UnitRaw raw[UNROLL][ROWS];
#if PROLOGUE == PROLOGUE_NORM
    fetch_norm(tid);
#endif
#if SPINS && PROLOGUE == PROLOGUE_NORM
    read_x(tid);  // read x before the weights: if it has arrived, this load need not queue behind theirs
#endif
#if CHOOSE
    // Which weights to load is known only after the choice.
  #if SPINS
    // x was complete before the logits were, so prepare it before spinning on them.
    fetch_x(tid, x_row);
    prologue(tid);
    SPIN_UNTIL(fetch_logits(tid, 0u), logits_arrived());
    MARK(MARK_INPUTS);
  #else
    fetch_logits(tid, 0u);
    #if PROLOGUE != PROLOGUE_NONE
    fetch_x(tid, x_row);
    #elif X_IN_REGISTERS
    fetch_own_x();
    #endif
  #endif
  #ifdef UNIT_TABLE
    unit_table(tid, WG);
  #endif
    choose_experts(tid);
    expert_row = chosen_id[y_row] * p.m;
    load(raw, first_row, 0);
  #if PROLOGUE != PROLOGUE_NONE && !SPINS
    prologue(tid);
  #endif
#else
    // Start the first loads of weights, so that they are in flight during the prologue.
    load(raw, first_row, 0);
  #ifdef UNIT_TABLE
    unit_table(tid, WG);
  #endif
  #if PROLOGUE != PROLOGUE_NONE
    fetch_x(tid, x_row);
    MARK(MARK_INPUTS);
    prologue(tid);
  #elif defined(UNIT_TABLE)
    barrier();
  #elif PREFETCH != PREFETCH_NONE || CHUNKS <= 2
    subgroupBarrier();  // else NVIDIA's driver sinks each load to its use, to save registers: Q2_K 4096x14336 is then 10 % slower
  #endif
#endif
#if X_IN_REGISTERS && !(CHOOSE && PROLOGUE == PROLOGUE_NONE)
    fetch_own_x();
#endif
    uint buf = 0;
#if LOOP_TILES
    for (uint tile = group; tile < tiles; tile += groups) {
        const bool has_next = tile + groups < tiles;
        const uint next_row = (tile + groups) * TILE_ROWS + slot_row;
#else
    {
        const uint tile = group;
        const bool has_next = false;
        const uint next_row = 0;
#endif
        [[unroll]] for (int r = 0; r < ROWS; r++)
            [[unroll]] for (int c = 0; c < COLS; c++) acc[r][c] = 0.0;
        fetch_addend();
        walk(raw, has_next, next_row);
        MARK(MARK_DONE);
        reduce(tid, buf);
        epilogue(tid, buf, tile);
        first_row = next_row;
        buf ^= LOOP_TILES;
    }
#if TOPK
    if (last_to_arrive(0u, min(groups, tiles))) {
        fetch_logits(tid, 0u);
        choose_experts(tid);
        store_chosen(tid, 0u, TOPK_SCALE);
    }
#endif
    MARK(MARK_END);
}

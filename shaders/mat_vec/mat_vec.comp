#version 450
// y = W x for 1 to COLS tokens: every quantized mat-vec, float and integer-dot (MMVQ), dense and MUL_MAT_ID, passes through here.
//
// A workgroup of WG threads makes SLOTS * ROWS weight rows: LANES neighbouring threads form a slot, which owns ROWS rows and walks their
// units (32 weights) side by side, UNROLL units a lane at once; the partial sums of its lanes are added at the end in a fixed order.
//
//   PATH_INT   1: q8_1 activations, dot products of packed bytes; 0: f32 activations
//   IDS        0: dense. 1: gl_WorkGroupID.z = token * n_used + slot picks the expert. 2: z = token, sums its experts by their weights
//   GLU        1: rows 2i and 2i + 1 of W are gate and up of output row i: y = silu(gate) * up
//   Y_TYPE     Y_Q8_1: the workgroup's output rows (a multiple of 32) are quantized before they are stored
#extension GL_KHR_shader_subgroup_basic : require
#if SUBGROUP > 1
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

#define X_F32 0
#define X_Q8_1 1
#define Y_F32 0
#define Y_Q8_1 1

layout(local_size_x = WG) in;

#include "quant/weights.glsl"
#include "mat_vec/iface.glsl"
#include QUANT_FILE
#if PATH_INT
#include "common/int_dot.glsl"
#endif
#if PROLOGUE == 2
#define WG_SIZE WG
#include "common/reduce.glsl"
#endif
#include "mat_vec/act.glsl"

#define SLOTS (WG / LANES)
#define PARTIALS (LANES / SUBGROUP)
#define CHUNK (LANES * UNROLL)
#define CHUNKS ((K_UNITS + CHUNK - 1) / CHUNK)
#define GROUP_ROWS (SLOTS * ROWS)
#define GROUP_OUT (GROUP_ROWS >> GLU)

float acc[ROWS][COLS];

#if PATH_INT
float unit_dot(uint q[8], vec2 scale, vec2 bias, Act a) {
    int lo = 0, hi = 0;
    for (int i = 0; i < 4; i++) {
        lo += dot4(q[i], a.q[i]);
        hi += dot4(q[i + 4], a.q[i + 4]);
    }
  #if UNIT_HALVES
    return a.d * (scale.x * float(lo) + scale.y * float(hi)) - dot(bias, a.sum);
  #elif UNIT_BIAS
    return a.d * (scale.x * float(lo + hi)) - bias.x * (a.sum.x + a.sum.y);
  #else
    return a.d * (scale.x * float(lo + hi));
  #endif
}
#endif

// Row of x for column c; columns past the last token read it again and are not stored.
uint token_row(uint x_row, uint c) {
#if COLS > 1
    return min(x_row + c, p.n - 1u);
#else
    return x_row;
#endif
}

// Adds one unit of ROWS rows times the activations of COLS tokens, each times `weight` (the expert's).
void accumulate(UnitRaw raw[ROWS], uint x_row, uint unit, float weight) {
#if PATH_INT
    uint q[ROWS][8];
    vec2 scale[ROWS], bias[ROWS];
    for (int r = 0; r < ROWS; r++) unit_ints(raw[r], q[r], scale[r], bias[r]);
    for (int c = 0; c < COLS; c++) {
        const Act a = act_load(token_row(x_row, c), unit);
        for (int r = 0; r < ROWS; r++) acc[r][c] += weight * unit_dot(q[r], scale[r], bias[r], a);
    }
#else
  #if COLS == 1
    const Act a = act_load(x_row, unit);
  #endif
    for (int r = 0; r < ROWS; r++) {
        vec4 w[8];
        unit_decode(raw[r], w);
        for (int c = 0; c < COLS; c++) {
  #if COLS > 1
            const Act a = act_load(token_row(x_row, c), unit);
  #endif
            vec4 sum = vec4(0.0);
            for (int i = 0; i < 8; i++) sum = fma(w[i], a.x[i], sum);
            acc[r][c] += weight * ((sum.x + sum.y) + (sum.z + sum.w));
        }
    }
#endif
}

// Loads the units lane, lane + LANES, ... of a chunk for this slot's rows. Past the end the last unit is read again and not used.
void load(out UnitRaw raw[UNROLL][ROWS], uint first_row, uint last_row, uint lane, uint chunk) {
    for (uint j = 0; j < UNROLL; j++)
        for (uint r = 0; r < ROWS; r++) raw[j][r] = unit_load(min(first_row + r, last_row), min(chunk * CHUNK + j * LANES + lane, K_UNITS - 1u));
}

// Goes through the row in chunks; `raw` holds chunk 0. With PREFETCH the next chunk is on its way while one is used.
void walk(UnitRaw raw[UNROLL][ROWS], uint first_row, uint last_row, uint lane, uint x_row, float weight) {
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
#if CHUNKS > 1 && PREFETCH
        UnitRaw next[UNROLL][ROWS];
        if (chunk + 1 < CHUNKS) load(next, first_row, last_row, lane, chunk + 1);
#endif
        for (uint j = 0; j < UNROLL; j++) {
            const uint unit = chunk * CHUNK + j * LANES + lane;
            if (K_UNITS % CHUNK == 0 || unit < K_UNITS) accumulate(raw[j], x_row, unit, weight);
        }
#if CHUNKS > 1 && PREFETCH
        raw = next;
#elif CHUNKS > 1
        if (chunk + 1 < CHUNKS) load(raw, first_row, last_row, lane, chunk + 1);
#endif
    }
}

#if PARTIALS > 1
shared float partial[COLS * ROWS * SLOTS * PARTIALS];
#endif

// Adds the partial sums of a slot's lanes: by shuffles inside a subgroup, through shared memory across subgroups.
void reduce(uint tid) {
#if SUBGROUP > 1
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++)
            for (uint step = 1; step < min(LANES, SUBGROUP); step <<= 1) acc[r][c] += subgroupShuffleXor(acc[r][c], step);
#endif
#if PARTIALS > 1
    const uint slot = tid / LANES, lane = tid % LANES;
    if (lane % SUBGROUP == 0)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLS; c++) partial[((c * ROWS + r) * SLOTS + slot) * PARTIALS + lane / SUBGROUP] = acc[r][c];
    barrier();
#endif
}

// Sum of row `r` of this thread's slot, in any of its lanes.
float row_total(uint tid, uint r, uint c) {
#if PARTIALS > 1
    float sum = 0.0;
    const uint base = ((c * ROWS + r) * SLOTS + tid / LANES) * PARTIALS;
    for (uint i = 0; i < PARTIALS; i++) sum += partial[base + i];
    return sum;
#else
    float sum = acc[0][c];
    for (uint i = 1; i < ROWS; i++) sum = i == r ? acc[i][c] : sum;
    return sum;
#endif
}

#include "mat_vec/epilogue.glsl"

void main() {
    const uint tid = gl_LocalInvocationIndex;
    const uint lane = tid % LANES;
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (group * GROUP_ROWS >= p.m) return;
    const uint row0 = group * GROUP_ROWS + (tid / LANES) * ROWS;

    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) acc[r][c] = 0.0;

    UnitRaw raw[UNROLL][ROWS];
    const uint own_row = min(row0, p.m - 1u);
#if IDS == 2
    const uint y_row = gl_WorkGroupID.z;
    for (uint slot = 0; slot < p.n_used; slot++) {
        const uint e = y_row * p.n_used + slot;
        const uint first = uint(ids[e]) * p.m;
        load(raw, first + own_row, first + p.m - 1u, lane, 0);
        walk(raw, first + own_row, first + p.m - 1u, lane, p.x_slots == 1u ? y_row : e, expert_weight[e]);
    }
#else
  #if IDS == 1
    const uint y_row = gl_WorkGroupID.z;
    const uint first = uint(ids[y_row]) * p.m;
    const uint x_row = p.x_slots == 1u ? y_row / p.n_used : y_row;
  #else
    const uint y_row = gl_WorkGroupID.z * COLS;
    const uint first = 0u;
    const uint x_row = y_row;
  #endif
    // The first weights are on their way before the prologue.
    load(raw, first + own_row, first + p.m - 1u, lane, 0);
  #if PROLOGUE
    prologue(tid);
  #endif
    walk(raw, first + own_row, first + p.m - 1u, lane, x_row, 1.0);
#endif
    reduce(tid);
    epilogue(tid, group, row0, y_row);
}

// The activations of a GEMV, one unit (32 values) at a time.
//   PROLOGUE_NONE  each unit is read from memory, F32 or Q8_1 as stored
//   PROLOGUE_NORM  from shared memory: every workgroup reads its token's F32 x, multiplies it by the norm's weight and keeps it there
//                  (quantized to Q8_1 on the integer path). Each workgroup repeats this work, but a dispatch and a barrier are saved. RMS norm;
//                  with BIND_NORM_BIAS a layer norm with bias. With BIND_POST_NORM, x is first replaced by post_residual + rms_norm(x) *
//                  post_norm; with BIND_SUM the first workgroup also stores that sum. Without BIND_NORM x is that sum
//   PROLOGUE_COPY  from shared memory: every workgroup copies its rows of x there, as Q8_1 on the integer path,
//                  as F32 (whole units) on the other
// X_WITHOUT_SUMS: the decoder needs no sums of x, which then take no shared memory.

struct ActRaw { uvec4 lo, hi; uvec2 ds; };  // a Q8_1 unit as stored
#if PATH_INT
// q: 32 int8; x = d * q. int_sum: sums of the int8 of the two halves; sum = d * int_sum.
struct Act { uint q[8]; float d; vec2 sum; ivec2 int_sum; };
#else
struct Act { vec4 x[8]; };
#endif

#if PATH_INT
#include "common/int16.glsl"
#endif

#if PROLOGUE != PROLOGUE_NONE && PATH_INT
shared uvec4 act_lo[WALK_UNITS];
shared uvec4 act_hi[WALK_UNITS];
#ifdef X_WITHOUT_SUMS
shared uint act_ds[WALK_UNITS];
#define DS_STORED(ds) (ds).x
#define DS_LOADED(stored) uvec2(stored, 0u)
#else
shared uvec2 act_ds[WALK_UNITS];
#define DS_STORED(ds) ds
#define DS_LOADED(stored) stored
#endif
#endif

#if PROLOGUE != PROLOGUE_NONE && !PATH_INT
// Values 4i .. 4i + 3 of all units lie side by side: lanes with neighbouring units read neighbouring words, free of bank conflicts.
shared vec4 act_x[8][WALK_UNITS];
#endif

#if PROLOGUE == PROLOGUE_NORM
#if PATH_INT
// Eight neighbouring threads quantize one unit: thread i holds its values 4 (i & 7) .. 4 (i & 7) + 3.
void store_act(uint i, vec4 v) {
    const Q8_1Quad packed = q8_1_pack(i, v);
    if (i >= K_UNITS * 8) return;
    const uint unit = i >> 3;
    if ((i & 4u) == 0u) act_lo[unit][i & 3u] = packed.word;
    else act_hi[unit][i & 3u] = packed.word;
    if ((i & 7u) == 0u) act_ds[unit] = DS_STORED(uvec2(packed.d, packed.halves));
}
#else
void store_act(uint i, vec4 v) {
    if (i < K_UNITS * 8) act_x[i & 7u][i >> 3] = v;
}
#endif

// 1 / rms(x) is a factor of every row sum. The epilogue applies it, so the walk need not wait for the reduction that makes it. A layer norm
// adds a bias that this factor must not touch, so it is applied before x is stored, and norm_factor is 1.
float norm_factor;

// A thread holds THREAD_QUADS vec4 of x in registers until they are quantized.
vec4 x_values[THREAD_QUADS];
#ifdef BIND_NORM
vec4 norm_values[THREAD_QUADS];
#endif
#ifdef BIND_NORM_BIAS
vec4 norm_bias_values[THREAD_QUADS];
#endif
#ifdef BIND_POST_NORM
vec4 post_values[THREAD_QUADS];
vec4 post_residual_values[THREAD_QUADS];
#endif
#define VALUE_AT(tid, j) min(tid + uint(j * WG), K_UNITS * 8 - 1u)
#define WITHIN_X(tid, j) (K_UNITS * 8 % WG == 0 || tid + uint(j * WG) < K_UNITS * 8)

void fetch_norm(uint tid) {
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
#ifdef BIND_NORM
        norm_values[j] = norm4[VALUE_AT(tid, j)];
#endif
#ifdef BIND_NORM_BIAS
        norm_bias_values[j] = norm_bias4[VALUE_AT(tid, j)];
#endif
#ifdef BIND_POST_NORM
        post_values[j] = post_norm4[VALUE_AT(tid, j)];
#endif
    }
}

void read_x(uint tid) {
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        x_values[j] = xf4[VALUE_AT(tid, j)];
#ifdef BIND_POST_NORM
        post_residual_values[j] = post_residual4[VALUE_AT(tid, j)];
#endif
    }
}

#if SPINS
bool x_arrived() {
    bool valid = true;
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        valid = valid && arrived(x_values[j]);
#if defined(BIND_POST_NORM) && SPINS_ON_ALL
        valid = valid && arrived(post_residual_values[j]);
#endif
    }
    return valid;
}
#endif

void fetch_x(uint tid, uint first_row) {
#if SPINS
    SPIN_ON(read_x(tid), x_arrived());  // the includer has called read_x() once already
#else
    read_x(tid);
#endif
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        if (!WITHIN_X(tid, j)) x_values[j] = vec4(0.0);
    }
}

#ifdef BIND_POST_NORM
// x = post_residual + rms_norm(x) * post_norm. Values past its end stay 0.
void post_norm(uint tid) {
    float square = 0.0;
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) square += dot(x_values[j], x_values[j]);
    const float factor = inversesqrt(wg_sum(square) / float(K_UNITS * 32) + p.eps);
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        if (!WITHIN_X(tid, j)) continue;
        x_values[j] = post_residual_values[j] + factor * x_values[j] * post_values[j];
#ifdef BIND_SUM
        if (gl_WorkGroupID == uvec3(0)) sum4[tid + uint(j * WG)] = not_sentinel(x_values[j]);
#endif
    }
}
#endif

#ifdef BIND_NORM_BIAS
void prologue(uint tid) {
    float sum = 0.0, square = 0.0;
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) sum += dot(x_values[j], vec4(1.0));
    const float mean = wg_sum(sum) / float(K_UNITS * 32);
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        x_values[j] -= mean;
        if (WITHIN_X(tid, j)) square += dot(x_values[j], x_values[j]);
    }
    const float factor = inversesqrt(wg_sum(square) / float(K_UNITS * 32) + p.eps);
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        x_values[j] = factor * x_values[j] * norm_values[j] + norm_bias_values[j];
        store_act(tid + uint(j * WG), x_values[j]);
    }
    norm_factor = 1.0;
    barrier();
}
#elif !defined(BIND_NORM)
void prologue(uint tid) {
    post_norm(tid);
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) store_act(tid + uint(j * WG), x_values[j]);
    norm_factor = 1.0;
    barrier();
}
#else
void prologue(uint tid) {
#ifdef BIND_POST_NORM
    post_norm(tid);
#endif
    float square = 0.0;
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) {
        square += dot(x_values[j], x_values[j]);
        x_values[j] *= norm_values[j];
    }
    [[unroll]] for (int j = 0; j < THREAD_QUADS; j++) store_act(tid + uint(j * WG), x_values[j]);
    norm_factor = inversesqrt(wg_sum(square) / float(K_UNITS * 32) + p.eps);
#if REDUCE_ONE_SUBGROUP
    barrier();  // with more subgroups, wg_sum contains this barrier
#endif
}
#endif
#elif PROLOGUE == PROLOGUE_COPY
#if PATH_INT
// Copies the rows of x that this workgroup needs, in the order in which its units of weights want them. Plain indices on purpose: with
// foldable() ones, as in act_fetch, a token of llama 1B Q4_K_S takes 383 us on an H200 instead of 350.
void fetch_x(uint tid, uint first_row) {
    for (uint i = tid; i < WALK_UNITS; i += WG) {
        const uint base = (p.x_slots == 1u ? first_row : first_row + i / K_UNITS) * p.x_stride, unit = x_unit0 + i % K_UNITS;
        uvec4 lo, hi;
        uvec2 ds;
        SPIN_UNTIL(lo = x4[base + unit]; hi = x4[base + X_UNITS + unit]; ds = x2[(base + 2u * X_UNITS) * 2u + unit],
              arrived(lo) && arrived(hi) && arrived(ds));
        act_lo[i] = lo;
        act_hi[i] = hi;
        act_ds[i] = DS_STORED(ds);
    }
}
#else
void fetch_x(uint tid, uint first_row) {
    for (uint i = tid; i < WALK_UNITS * 8; i += WG) {
        const uint unit = i >> 3, row = p.x_slots == 1u ? first_row : first_row + unit / K_UNITS;
        vec4 v;
        SPIN_UNTIL(v = xf4[row * (p.x_stride >> 2) + (x_unit0 + unit % K_UNITS) * 8u + (i & 7u)], arrived(v));
        act_x[i & 7u][unit] = v;
    }
}
#endif

void prologue(uint tid) {
#if !CHOOSE
    barrier();
#endif
}
#endif

// Unit `unit + unit_offset` of row `row` of x; unit_offset is a constant, as in Place (quant/place.glsl).
// With a prologue, rows count from the first one in shared memory.
#if PROLOGUE != PROLOGUE_NONE && PATH_INT
ActRaw act_fetch(uint row, uint unit, uint unit_offset) {
    const uint at = (PROLOGUE == PROLOGUE_COPY ? row * K_UNITS : 0u) + unit + unit_offset;
    return ActRaw(act_lo[at], act_hi[at], DS_LOADED(act_ds[at]));
}
#elif X_TYPE == X_Q8_1
ActRaw act_fetch(uint row, uint unit, uint unit_offset) {
    const uint base = row * p.x_stride, quads = foldable(base + x_unit0 + unit) + unit_offset;
    return ActRaw(x4[quads], x4[quads + X_UNITS], x2[foldable(base * 2u + x_unit0 + unit) + (4u * X_UNITS + unit_offset)]);
}
#endif

#if PATH_INT
Act unpack_act(ActRaw r) {
    Act a;
    [[unroll]] for (int i = 0; i < 4; i++) {
        a.q[i] = r.lo[i];
        a.q[i + 4] = r.hi[i];
    }
    a.d = uintBitsToFloat(r.ds.x);
    a.int_sum = int16_pair(r.ds.y);
    a.sum = a.d * vec2(a.int_sum);
    return a;
}
#endif

Act act_load(uint row, uint unit, uint unit_offset) {
#if PATH_INT
    return unpack_act(act_fetch(row, unit, unit_offset));
#else
    Act a;
  #if PROLOGUE != PROLOGUE_NONE
    [[unroll]] for (int i = 0; i < 8; i++) a.x[i] = act_x[i][(PROLOGUE == PROLOGUE_COPY ? row * K_UNITS : 0u) + unit + unit_offset];
  #elif X_TYPE == X_Q8_1
    const ActRaw r = act_fetch(row, unit, unit_offset);
    [[unroll]] for (int i = 0; i < 8; i++) {
        const int word = int(i < 4 ? r.lo[i & 3] : r.hi[i & 3]);
        a.x[i] = uintBitsToFloat(r.ds.x) * vec4((word << 24) >> 24, (word << 16) >> 24, (word << 8) >> 24, word >> 24);
    }
  #elif K_TAIL
    const uint column = (unit + unit_offset) * 32u;
    for (uint i = 0; i < 32u; i++) a.x[i >> 2][i & 3u] = column + i < p.k ? x1[row * p.x_stride + column + i] : 0.0;
  #else
    const uint base = foldable(row * (p.x_stride >> 2) + (x_unit0 + unit) * 8u) + unit_offset * 8u;
    [[unroll]] for (int i = 0; i < 8; i++) a.x[i] = xf4[base + i];
  #endif
    return a;
#endif
}

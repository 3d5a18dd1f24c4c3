#version 450
// RMS norm and layer norm of rows, fused with an addition before, the weight, and additions after.
//
//   x = a (+ b)      y = x / sqrt(mean(x^2) + eps) (* w) (+ bias) (+ residual)      layer norm: x - mean(x) in place of x
//
// With GROUPS, rows are groups of a token's values, each with its own part of the weight; a Q8_1 row is a token's.
//
// Bindings in this order; those in brackets exist with the define:
//   a [rows, dim], [ADD: b [rows, dim]], [WEIGHT: w [GROUPS, dim]], [BIAS: bias [dim]], [RESIDUAL: residual [rows, dim]],
//   [ADD: sum [rows, dim], out], y [rows, dim] F32 or Q8_1 (OUT_Q8_1)
//
// One workgroup per row; thread t has quads (4 values) t, t + WG_SIZE, ...
//
// Defines:
//   WIDTH   4: dim is a multiple of 4, and memory is read as vec4; 1: value by value
//   ROUNDS  quads per thread; row and weight stay in registers. 0: p.rounds quads per thread, and the row is read again
//   CENTER  1: layer norm
//   GROUPS  rows that follow each other with weights of their own; of Q8_1 each is whole units
//   those of common/sentinel.glsl and common/arrivals.glsl
#extension GL_EXT_control_flow_attributes : require
#define REDUCE_GROUPS OUT_Q8_1
#include "common/reduce.glsl"
#include "common/clock.glsl"
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;
#include "common/arrivals.glsl"

#if WIDTH == 4
#define ELEMENT vec4
#else
#define ELEMENT float
#endif

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    uint quads;     // quads of a row; the last one may be incomplete
    uint rounds;
    uint units;     // units of a Q8_1 row
    float eps;
} p;

#define BIND_OUT (1 + ADD + WEIGHT + BIAS + RESIDUAL)
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InA { ELEMENT a[]; };
#if ADD
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InB { ELEMENT b[]; };
layout(std430, set = 0, binding = BIND_OUT) buffer OutSum { ELEMENT sum[]; };
#endif
#if WEIGHT
layout(std430, set = 0, binding = 1 + ADD) readonly buffer Weight { ELEMENT w[]; };
#endif
#if BIAS
layout(std430, set = 0, binding = 1 + ADD + WEIGHT) readonly buffer Bias { ELEMENT bias[]; };
#endif
#if RESIDUAL
layout(std430, set = 0, binding = 1 + ADD + WEIGHT + BIAS) SYNC_INPUT buffer Residual { ELEMENT residual[]; };
#endif
#if OUT_Q8_1
layout(std430, set = 0, binding = BIND_OUT + ADD) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#define STORE_Q8_1(row, q, packed) q8_1_store((row) / GROUPS, GROUPS * p.units, (row) % GROUPS * 8u * p.units + (q), packed)
#else
layout(std430, set = 0, binding = BIND_OUT + ADD) writeonly buffer OutY { ELEMENT y[]; };
#endif

#if WIDTH == 4
#define LOAD(from, row, q) from[(row) * p.quads + (q)]
#define STORE(to, row, q, v) to[(row) * p.quads + (q)] = not_sentinel(v)
#else
#define AT(row, q, c) ((row) * p.dim + 4u * (q) + c)
#define LOAD_ONE(from, row, q, c) (4u * (q) + c < p.dim ? from[AT(row, q, c)] : 0.0)
#define LOAD(from, row, q) vec4(LOAD_ONE(from, row, q, 0u), LOAD_ONE(from, row, q, 1u), LOAD_ONE(from, row, q, 2u), LOAD_ONE(from, row, q, 3u))
#define STORE(to, row, q, v) for (uint c = 0u; c < 4u; c++) if (4u * (q) + c < p.dim) to[AT(row, q, c)] = not_sentinel(v[c])
#endif
// What is read of other stages: of padding LOAD gives zeros.
#define LOAD_MADE(v, from, row, q) SPIN_UNTIL(v = LOAD(from, row, q), arrived(v))
#if SPINS_ON_PARTS
#define LOAD_OLDER(v, from, row, q) LOAD_MADE(v, from, row, q)
#else
#define LOAD_OLDER(v, from, row, q) v = LOAD(from, row, q)
#endif

// x of this row. The first pass forms the sum a + b; later passes read it from memory.
vec4 load_x(uint row, uint q) {
    vec4 v;
    LOAD_MADE(v, a, row, q);
#if ADD
    vec4 other;
    LOAD_OLDER(other, b, row, q);
    v += other;
    STORE(sum, row, q, v);
#endif
    return v;
}

vec4 reload_x(uint row, uint q) {
#if ADD
    return LOAD(sum, row, q);
#else
    return LOAD(a, row, q);
#endif
}

// Bias and residual of a quad of y.
vec4 addend(uint row, uint q) {
    vec4 v = vec4(0.0);
#if BIAS
    v += LOAD(bias, 0u, q);
#endif
#if RESIDUAL
    vec4 more;
    LOAD_OLDER(more, residual, row, q);
    v += more;
#endif
    return v;
}

// 1 for those values of a quad that lie within the row.
vec4 inside_row(uint q) {
    return vec4(lessThan(uvec4(4u * q) + uvec4(0u, 1u, 2u, 3u), uvec4(p.dim)));
}

#if ROUNDS
#define FOR_EACH_QUAD(i) [[unroll]] for (uint i = 0u; i < ROUNDS; i++)
#define X_QUAD(i, q) kept[i]
#else
#define FOR_EACH_QUAD(i) for (uint i = 0u; i < p.rounds; i++)
#define X_QUAD(i, q) (q < p.quads ? reload_x(row, q) : vec4(0.0))
#endif

void main() {
    MARK(MARK_BEGIN);
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x;
#if ROUNDS
    vec4 kept[ROUNDS];
#if WEIGHT
    vec4 weight[ROUNDS];    // read before the reduction, which hides the latency
#endif
#if BIAS || RESIDUAL
    vec4 added[ROUNDS];     // likewise
#endif
#endif
    float total = 0.0;
    FOR_EACH_QUAD(i) {
        const uint q = i * WG_SIZE + t;
        const vec4 v = q < p.quads ? load_x(row, q) : vec4(0.0);
#if ROUNDS
        kept[i] = v;
#if WEIGHT
        weight[i] = q < p.quads ? LOAD(w, row % GROUPS, q) : vec4(0.0);
#endif
#if BIAS || RESIDUAL
        added[i] = q < p.quads ? addend(row, q) : vec4(0.0);
#endif
#endif
#if CENTER
        total += dot(v, vec4(1.0));
#else
        total += dot(v, v);
#endif
    }
    MARK(MARK_INPUTS);
#if CENTER
    const float mean = wg_sum(total) / float(p.dim);
    total = 0.0;
    FOR_EACH_QUAD(i) {
        const uint q = i * WG_SIZE + t;
        const vec4 v = (X_QUAD(i, q) - mean) * inside_row(q);
        total += dot(v, v);
    }
#else
    const float mean = 0.0;
#endif
    const float scale = 1.0 / sqrt(wg_sum(total) / float(p.dim) + p.eps);
    MARK(MARK_DONE);
#if OUT_Q8_1 && ROUNDS
    Q8_1Quad packed[ROUNDS];
#endif
    FOR_EACH_QUAD(i) {
        const uint q = i * WG_SIZE + t;
        vec4 v = (X_QUAD(i, q) - mean) * scale;
#if WEIGHT && ROUNDS
        v *= weight[i];
#elif WEIGHT
        v *= q < p.quads ? LOAD(w, row % GROUPS, q) : vec4(0.0);
#endif
#if (BIAS || RESIDUAL) && ROUNDS
        v += added[i];
#elif BIAS || RESIDUAL
        v += q < p.quads ? addend(row, q) : vec4(0.0);
#endif
#if OUT_Q8_1
        const Q8_1Quad packed_quad = q8_1_pack(q, q < p.quads ? v : vec4(0.0));
#if ROUNDS
        packed[i] = packed_quad;
    }
    FOR_EACH_QUAD(i) {
        const uint q = i * WG_SIZE + t;
        if (q < 8u * p.units) STORE_Q8_1(row, q, packed[i]);
#else
        if (q < 8u * p.units) STORE_Q8_1(row, q, packed_quad);
#endif
#else
        if (q < p.quads) { STORE(y, row, q, v); }
#endif
    }
    arrive();
    MARK(MARK_END);
}

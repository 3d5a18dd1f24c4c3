#version 450
// AltUp of one token (altup/altup.comp) with the norms and the router before it: ALTUP_PREDICT_ROUTED (CORRECT 0), ALTUP_CORRECT_ROUTED (1).
//
//   made = norm(made) * post_norm (+ residual, with CORRECT)
//   m = tanh(router . (norm(read) * router_norm)), where read is made with CORRECT, else the active stream
//   CORRECT 0  y[s] = x[s] + sum over r of x[r] * (coef[s, r] . m); with ADDED made is added to every x but the active one
//   CORRECT 1  y[s] = x[s] + (1 + coef[s] . m) * (made - x[0]); and y[0] times output_scale
//
//   binding 0  active F32 [DIM]              x[0]
//   binding 1  others F32 [STREAMS - 1, DIM] x[1] and the rest
//   binding 2  router_norm F32 [DIM]
//   binding 3  router F16 or F32 [STREAMS, DIM], planes (docs/weight_layout.md)
//   binding 4  coef F32 [STREAMS * STREAMS * STREAMS], CORRECT 1: [STREAMS * STREAMS]
//   binding 5  F32 [DIM]                     y[0]
//   binding 6  F32 [STREAMS - 1, DIM]        y[1] and the rest
//   binding 7  made F32 [DIM]                (CORRECT or ADDED)
//   binding 8  post_norm F32 [DIM]           (CORRECT or ADDED)
//   binding 9  residual F32 [DIM]            (CORRECT)
//   binding 10 output_scale F32 [DIM]        (CORRECT)
//   binding 11 F32 or Q8_1 (OUT_Q8_1) [DIM]  y[0] * output_scale (CORRECT)
//
// A workgroup makes QUADS_EACH quads of columns of all streams. The sums over a row it finds by itself: thread t has quads t, t + WG_SIZE, ...
//
// Defines: DIM STREAMS QUADS_EACH CORRECT ADDED ROUTER_F16 OUT_Q8_1; those of common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#define REDUCE_GROUPS OUT_Q8_1
#include "common/reduce.glsl"
#include "common/sentinel.glsl"
#include "elementwise/functions.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint router_part;  // 16-byte words from one part of the router's rows to the next
    float eps;
} p;

#define QUADS (DIM / 4u)
#define UNITS ((DIM + 31u) / 32u)
#define ROUNDS ((QUADS + WG_SIZE - 1u) / WG_SIZE)
#define HAS_MADE (CORRECT || ADDED)
#define WEIGHTS (CORRECT == 1 ? STREAMS : STREAMS * STREAMS)

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InActive { vec4 active4[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InOthers { vec4 others4[]; };
layout(std430, set = 0, binding = 2) readonly buffer InRouterNorm { vec4 router_norm4[]; };
layout(std430, set = 0, binding = 3) readonly buffer InRouter { uvec4 router4[]; };
layout(std430, set = 0, binding = 4) readonly buffer InCoef { float coef[]; };
layout(std430, set = 0, binding = 5) writeonly buffer OutActive { vec4 y_active4[]; };
layout(std430, set = 0, binding = 6) writeonly buffer OutOthers { vec4 y_others4[]; };
#if HAS_MADE
layout(std430, set = 0, binding = 7) SYNC_INPUT buffer InMade { vec4 made4[]; };
layout(std430, set = 0, binding = 8) readonly buffer InPostNorm { vec4 post_norm4[]; };
#endif
#if CORRECT
layout(std430, set = 0, binding = 9) SYNC_INPUT buffer InResidual { vec4 residual4[]; };
layout(std430, set = 0, binding = 10) readonly buffer InScale { vec4 output_scale4[]; };
#if OUT_Q8_1
layout(std430, set = 0, binding = 11) writeonly buffer OutScaled { uint y_words[]; };
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 11) writeonly buffer OutScaled { vec4 y_scaled4[]; };
#endif
#endif

shared float weights[WEIGHTS];

vec4 router_quad(uint row, uint quad) {
    const uint unit = row * UNITS + quad / 8u, place = quad % 8u;
#if ROUTER_F16
    const uvec4 eight = router4[place / 2u * p.router_part + unit];
    const uvec2 words = (place & 1u) == 0u ? eight.xy : eight.zw;
    return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
#else
    return uintBitsToFloat(router4[place * p.router_part + unit]);
#endif
}

// Inputs that this dispatch reads a whole row of, and those of which it reads its own columns.
vec4 active_quad(uint quad) {
    vec4 v;
#if SPINS_ON_ALL && !CORRECT
    SPIN_UNTIL(v = active4[quad], arrived(v));
#else
    v = active4[quad];
#endif
    return v;
}

vec4 others_quad(uint at) {
    vec4 v;
#if SPINS_ON_PARTS
    SPIN_UNTIL(v = others4[at], arrived(v));
#else
    v = others4[at];
#endif
    return v;
}

#if CORRECT
vec4 residual_quad(uint quad) {
    vec4 v;
#if SPINS_ON_ALL
    SPIN_UNTIL(v = residual4[quad], arrived(v));
#else
    v = residual4[quad];
#endif
    return v;
}
#endif

void main() {
    const uint t = gl_LocalInvocationID.x, first = gl_WorkGroupID.x * QUADS_EACH;
    // Weights of the router do not wait for anything.
    vec4 rows[STREAMS][ROUNDS];
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, QUADS - 1u);
        const vec4 normed = i * WG_SIZE + t < QUADS ? router_norm4[quad] : vec4(0.0);
        [[unroll]] for (uint s = 0u; s < STREAMS; s++) rows[s][i] = normed * router_quad(s, quad);
    }
    vec4 read[ROUNDS];
#if HAS_MADE
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, QUADS - 1u);
        vec4 v;
        SPIN_UNTIL(v = made4[quad], arrived(v));
        read[i] = v;
        if (i * WG_SIZE + t < QUADS) square += dot(v, v);
    }
    const float made_scale = 1.0 / sqrt(wg_sum(square) / float(DIM) + p.eps);
#endif
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, QUADS - 1u);
#if CORRECT
        read[i] = read[i] * made_scale * post_norm4[quad] + residual_quad(quad);
#else
        read[i] = active_quad(quad);
#endif
        if (i * WG_SIZE + t >= QUADS) read[i] = vec4(0.0);
    }
    float squares = 0.0, m[STREAMS];
    [[unroll]] for (uint s = 0u; s < STREAMS; s++) m[s] = 0.0;
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        squares += dot(read[i], read[i]);
        [[unroll]] for (uint s = 0u; s < STREAMS; s++) m[s] += dot(read[i], rows[s][i]);
    }
    const float scale = 1.0 / sqrt(wg_sum(squares) / float(DIM) + p.eps);
    [[unroll]] for (uint s = 0u; s < STREAMS; s++) m[s] = tanh_exact(scale * wg_sum(m[s]));
    for (uint i = t; i < WEIGHTS; i += WG_SIZE) {
        float weight = float(CORRECT);
        [[unroll]] for (uint k = 0u; k < STREAMS; k++) weight += coef[i * STREAMS + k] * m[k];
        weights[i] = weight;
    }
    barrier();

    // Threads of one stream are neighbours, those of the active one first.
    for (uint base = 0u; base < QUADS_EACH * STREAMS; base += WG_SIZE) {
        const uint s = (base + t) / QUADS_EACH, quad = first + (base + t) % QUADS_EACH;
        const bool valid = s < STREAMS && quad < QUADS;
        vec4 y = vec4(0.0);
        if (valid) {
#if CORRECT
            const vec4 before = active_quad(quad);
            y = s == 0u ? before : others_quad((s - 1u) * QUADS + quad);
            y += weights[s] * (made4[quad] * made_scale * post_norm4[quad] + residual4[quad] - before);
#else
#if ADDED
            const vec4 added = made4[quad] * made_scale * post_norm4[quad];
#else
            const vec4 added = vec4(0.0);
#endif
            [[unroll]] for (uint r = 0u; r < STREAMS; r++) {
                const vec4 x = r == 0u ? active4[quad] : others_quad((r - 1u) * QUADS + quad) + added;
                y += ((r == s ? 1.0 : 0.0) + weights[s * STREAMS + r]) * x;
            }
#endif
            if (s == 0u) y_active4[quad] = not_sentinel(y);
            else y_others4[(s - 1u) * QUADS + quad] = not_sentinel(y);
        }
#if CORRECT
        if (base < QUADS_EACH) {
            const vec4 scaled = valid && s == 0u ? y * output_scale4[quad] : vec4(0.0);
#if OUT_Q8_1
            const Q8_1Quad packed = q8_1_pack(quad, scaled);
            if (valid && s == 0u) q8_1_store(0u, UNITS, quad, packed);
#else
            if (valid && s == 0u) y_scaled4[quad] = not_sentinel(scaled);
#endif
        }
#endif
    }
}

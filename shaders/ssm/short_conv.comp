#version 450
// SHORT_CONV: the gated short convolution of LFM2, y[t, c] = C[t, c] * sum over j of w[c, j] * (B x)[t - (TAPS - 1) + j, c], and its state.
//
// Bindings in this order (STORE 1: bcx, pos, state):
//   bcx    F32 [n, 3 channels]; a row is B, C and x
//   w      F32 [channels, TAPS]
//   pos    I32 [n]; -1: padding, which is at the end, gives zeros and is not stored
//   state  F32 [RING, channels] (ssm/taps.glsl), of B x
//   y      F32 [n, channels] (STORE 0); with OUT_Q8_1, which takes ONE, Q8_1 rows
//   [BIND_SLOTS: slots I32 [n]: each token is of a sequence of its own, whose state is number slots[t]; state then has one more axis in front]
//   [BIND_DRAWS: draws I32 [n] (BIND_SLOTS): a sequence may have drafts in columns of their own (ssm/own_columns.glsl)]
//
// ONE 1: every token is alone, its sequence's only one in this batch: thread (x, y) computes channel x of token y, and stores its B x; with
// OUT_Q8_1 four channels, since eight threads round a unit of 32.
// ONE 0: STORE 0 computes the tokens of one sequence. STORE 1 runs in a later stage, because the first tokens of other workgroups still need
// the rows that it overwrites: thread (x, y) stores channel x of the y-th last token that is not padding.
#ifndef OUT_Q8_1
#define OUT_Q8_1 0
#endif
#if OUT_Q8_1
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"
#endif
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint channels;
} p;

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InBcx { float bcx[]; };
#if STORE
layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 2) writeonly buffer State { float state[]; };
#else
layout(std430, set = 0, binding = 1) readonly buffer InW { float w[]; };
layout(std430, set = 0, binding = 2) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 3) buffer State { float state[]; };
#if OUT_Q8_1
layout(std430, set = 0, binding = 4) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 4) writeonly buffer OutY { float y[]; };
#endif
#endif

#ifdef BIND_SLOTS
layout(std430, set = 0, binding = BIND_SLOTS) readonly buffer InSlots { int slots[]; };
#define SEQUENCE uint(slots[gl_WorkGroupID.y])
#ifdef BIND_DRAWS
layout(std430, set = 0, binding = BIND_DRAWS) readonly buffer InDraws { int draws[]; };
#include "ssm/own_columns.glsl"
#endif
#else
#define SEQUENCE 0u
#endif

#define B_OF(token, c) bcx[(token) * 3u * p.channels + (c)]
#define C_OF(token, c) bcx[((token) * 3u + 1u) * p.channels + (c)]
#define X_OF(token, c) bcx[((token) * 3u + 2u) * p.channels + (c)]
#ifdef BIND_DRAWS
#define CONV_X(token, c) (B_OF(own_columns[token], c) * X_OF(own_columns[token], c))
#else
#define CONV_X(token, c) (B_OF(token, c) * X_OF(token, c))
#endif
#define CONV_ROW(row, c) state[(SEQUENCE * RING + (row)) * p.channels + (c)]
#include "ssm/taps.glsl"

#if !STORE
// Channel c of token t at position `at`, of which it stores B x where the token is alone.
float channel(uint t, int at, uint c) {
#ifdef BIND_DRAWS
    const uint mine = drafted(t) ? uint(draws[t]) - 1u : 0u;
#else
    const uint mine = 0u;
#endif
    float sum = 0.0;
  #if ONE
    for (uint back = TAPS - 1u; back > 0u; back--) sum = fma(w[c * TAPS + TAPS - 1u - back], CONV_TAP(mine, at, c, back), sum);
    float b, x;
    SPIN_UNTIL(b = B_OF(t, c), arrived(b));
    SPIN_UNTIL(x = X_OF(t, c), arrived(x));
    const float own = b * x;
    // No tap of a token here reads the row of the ring that is written here.
    if (at >= 0) CONV_ROW(uint(at) % RING, c) = own;
  #else
    for (uint back = TAPS - 1u; back > 0u; back--) sum = fma(w[c * TAPS + TAPS - 1u - back], CONV_TAP(t, at, c, back), sum);
    const float own = CONV_X(t, c);
  #endif
    sum = fma(w[c * TAPS + TAPS - 1u], own, sum);
    float gate;
    SPIN_UNTIL(gate = C_OF(t, c), arrived(gate));
    return at >= 0 ? gate * sum : 0.0;
}
#endif

void main() {
#ifdef BIND_DRAWS
    gather_columns(gl_WorkGroupID.y);
#endif
#if OUT_Q8_1
    const uint quad = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x, t = gl_WorkGroupID.y;
    const bool valid = 4u * quad < p.channels;
    vec4 v = vec4(0.0);
    if (valid)
        for (uint i = 0u; i < 4u; i++) v[i] = channel(t, pos[t], 4u * quad + i);
    const Q8_1Quad packed = q8_1_pack(quad, v);
    if (valid) q8_1_store(t, p.channels / 32u, quad, packed);
#else
    const uint c = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (c >= p.channels) return;
#if STORE
    // Number of tokens before the padding, by binary search.
    uint real = 0u, end = p.n;
    while (real < end) {
        const uint middle = (real + end) / 2u;
        if (pos[middle] >= 0) real = middle + 1u;
        else end = middle;
    }
    const uint last = gl_WorkGroupID.y;
    if (last < real) CONV_ROW(uint(pos[real - 1u - last]) % RING, c) = CONV_X(real - 1u - last, c);
#else
    const uint t = gl_WorkGroupID.y;
    y[t * p.channels + c] = not_sentinel(channel(t, pos[t], c));
#endif
#endif
}

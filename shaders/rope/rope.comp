#version 450
// RoPE of heads by angles that rope/angles.comp made (ROPE 0: none is rotated). With STORE, also the norm of the Q and K heads before it, and
// the store of K and V: into the cache as f16 or, with STORE_F32, as F32, for a cache of another type.
//
// Bindings in this order; those in brackets exist with the define:
//   q F32 [tokens, q_heads, head_dim]; PACKED: [tokens, q_heads + 2 * kv_heads, head_dim], the heads of q, k, v
//   [STORE and not PACKED: k, v F32 [tokens, kv_heads, head_dim]]
//   [STORE and not STORE_F32: rows I32 [tokens]: the row of the cache that a token is stored in; -1 or one outside the cache: none]
//   [NORM: weights of q and k F32 [head_dim]]   [ROPE: angles vec4 [tokens, pairs / 2]: (cos, sin) of two neighbouring pairs]
//   q_out F32 [tokens, q_heads, head_dim]   [STORE: cache_k, cache_v F16 [kv_heads, n_ctx, head_dim]; STORE_F32: F32 [tokens, kv_heads,
//   head_dim]]
//
// A workgroup takes p.heads consecutive heads of one token, counted over q, k, v, one after another, and reads the angles once for all of
// them. Thread t has slots t, t + WG_SIZE, ... of a head (rope/slots.glsl).
//
// Defines: ROUNDS: slots of a thread; ROPE; STORE, STORE_F32, PACKED, NORM; those of rope/slots.glsl, common/reduce.glsl,
// common/sentinel.glsl and common/arrivals.glsl
#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"
#if STORE && !STORE_F32
#include "cache/f16_bits.glsl"
#endif

layout(local_size_x = WG_SIZE) in;

#include "common/clock.glsl"
#include "common/sentinel.glsl"
#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint tokens;
    uint n_ctx;
    float eps;
    uint head_dim;    // a multiple of 4
    uint q_heads;
    uint kv_heads;    // 0 without STORE
    uint heads;       // of a workgroup
    uint pairs;       // that are rotated; even
} p;

#define ROPE_PAIRS p.pairs
#include "rope/slots.glsl"

#define BIND_ROWS (1 + 2 * STORE * (1 - PACKED))
#define BIND_NORM (BIND_ROWS + STORE * (1 - STORE_F32))
#define BIND_ANGLES (BIND_NORM + 2 * NORM)
#define BIND_OUT (BIND_ANGLES + ROPE)

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InQ { vec2 q[]; };
#if STORE && !PACKED
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InK { vec2 k[]; };
layout(std430, set = 0, binding = 2) SYNC_INPUT buffer InV { vec2 v[]; };
#endif
#if STORE && !STORE_F32
layout(std430, set = 0, binding = BIND_ROWS) readonly buffer InRows { int rows[]; };
#endif
#if NORM
layout(std430, set = 0, binding = BIND_NORM) readonly buffer QNorm { vec2 q_norm[]; };
layout(std430, set = 0, binding = BIND_NORM + 1) readonly buffer KNorm { vec2 k_norm[]; };
#endif
#if ROPE
layout(std430, set = 0, binding = BIND_ANGLES) readonly buffer InAngles { vec4 angles[]; };
#endif
layout(std430, set = 0, binding = BIND_OUT) writeonly buffer OutQ { vec2 q_out[]; };
#if STORE && STORE_F32
layout(std430, set = 0, binding = BIND_OUT + 1) writeonly buffer OutK { vec2 k_out[]; };
layout(std430, set = 0, binding = BIND_OUT + 2) writeonly buffer OutV { vec2 v_out[]; };
#elif STORE
layout(std430, set = 0, binding = BIND_OUT + 1) writeonly buffer CacheK { uint cache_k[]; };
layout(std430, set = 0, binding = BIND_OUT + 2) writeonly buffer CacheV { uint cache_v[]; };
#endif

// Where a head of a token begins, in units of two values, among `heads` heads a token.
uint begin_of(uint token, uint head, uint heads) { return (token * heads + head) * (p.head_dim / 2u); }

vec2 load(uint token, uint head, uint place) {
#if PACKED
    return q[begin_of(token, head, p.q_heads + 2u * p.kv_heads) + place];
#elif STORE
    if (head >= p.q_heads + p.kv_heads) return v[begin_of(token, head - p.q_heads - p.kv_heads, p.kv_heads) + place];
    if (head >= p.q_heads) return k[begin_of(token, head - p.q_heads, p.kv_heads) + place];
    return q[begin_of(token, head, p.q_heads) + place];
#else
    return q[begin_of(token, head, p.q_heads) + place];
#endif
}

void store(uint token, uint head, uint place, int row, vec2 x) {
    if (head < p.q_heads) {
        q_out[begin_of(token, head, p.q_heads) + place] = x;
        return;
    }
#if STORE && STORE_F32
    if (head < p.q_heads + p.kv_heads) k_out[begin_of(token, head - p.q_heads, p.kv_heads) + place] = x;
    else v_out[begin_of(token, head - p.q_heads - p.kv_heads, p.kv_heads) + place] = x;
#elif STORE
    if (row < 0 || uint(row) >= p.n_ctx) return;
    const uint word = f16_bits_of(x);
    if (head < p.q_heads + p.kv_heads) cache_k[begin_of(head - p.q_heads, uint(row), p.n_ctx) + place] = word;
    else cache_v[begin_of(head - p.q_heads - p.kv_heads, uint(row), p.n_ctx) + place] = word;
#endif
}

void main() {
    MARK(MARK_BEGIN);
    const uint token = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    if (token >= p.tokens) {
        arrive();
        return;
    }
    const uint t = gl_LocalInvocationID.x;
    const uint first = gl_WorkGroupID.x * p.heads, slots = p.head_dim / 4u;
#if STORE && !STORE_F32
    const int row = rows[token];
#else
    const int row = -1;
#endif
#if ROPE
    vec4 own_angles[ROUNDS];
    if (first < p.q_heads + p.kv_heads) {
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            if (slot < ROTATED_SLOTS) own_angles[i] = angles[token * ROTATED_SLOTS + slot];
        }
    }
#endif
    for (uint head = first; head < min(first + p.heads, p.q_heads + 2u * p.kv_heads); head++) {
        vec2 a[ROUNDS], b[ROUNDS];
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            const uvec2 at = places(slot);
            SPIN_UNTIL(a[i] = slot < slots ? load(token, head, at.x) : vec2(0.0); b[i] = slot < slots ? load(token, head, at.y) : vec2(0.0),
                       arrived(a[i]) && arrived(b[i]));
        }
        MARK(MARK_INPUTS);    // of the last head
        const bool value = head >= p.q_heads + p.kv_heads;
#if NORM
        if (!value) {
            float square = 0.0;
            [[unroll]] for (uint i = 0u; i < ROUNDS; i++) square += dot(a[i], a[i]) + dot(b[i], b[i]);
            const float scale = 1.0 / sqrt(wg_sum(square) / float(p.head_dim) + p.eps);
            [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
                const uint slot = i * WG_SIZE + t;
                if (slot < slots) {
                    const uvec2 at = places(slot);
                    a[i] *= scale * (head < p.q_heads ? q_norm[at.x] : k_norm[at.x]);
                    b[i] *= scale * (head < p.q_heads ? q_norm[at.y] : k_norm[at.y]);
                }
            }
        }
#endif
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            if (slot >= slots) continue;
#if ROPE
            if (!value && slot < ROTATED_SLOTS) rotate(a[i], b[i], own_angles[i]);
#endif
            const uvec2 at = places(slot);
            store(token, head, at.x, row, a[i]);
            store(token, head, at.y, row, b[i]);
        }
    }
    MARK(MARK_DONE);
    arrive();
    MARK(MARK_END);
}

#version 450
// RoPE of heads (none if ROPE_PAIRS is 0). With STORE, also the norm of the Q and K heads before it, and the store of K and V: into the cache
// as f16 or, with STORE_F32, as F32, for a cache of another type.
//
// Bindings in this order; those in brackets exist with the define:
//   q F32 [tokens, Q_HEADS, HEAD_DIM]; PACKED: [tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM], the heads of q, k, v
//   [STORE and not PACKED: k, v F32 [tokens, KV_HEADS, HEAD_DIM]]
//   pos I32 [tokens]: -1 or a position outside the cache stores nothing
//   [NORM: weights of q and k F32 [HEAD_DIM]]   [FACTORS: F32 [ROPE_PAIRS]; they divide the frequencies]
//   q_out F32 [tokens, Q_HEADS, HEAD_DIM]   [STORE: cache_k, cache_v F16 [KV_HEADS, n_ctx, HEAD_DIM]; STORE_F32: F32 [tokens, KV_HEADS,
//   HEAD_DIM]]
//   [BIND_ROWS: rows I32 [tokens]: the row of the cache that a token is stored in, instead of pos (pages of several sequences)]
//
// A workgroup takes HEADS consecutive heads of one token, counted over q, k, v, one after another, and computes the angles once for all of
// them. Thread t has slots t, t + WG_SIZE, ... of a head (rope/slots.glsl).
//
// Defines: HEAD_DIM (a multiple of 4), Q_HEADS, KV_HEADS (0 without STORE), HEADS; those of rope/rope.glsl, rope/slots.glsl,
// common/reduce.glsl, common/sentinel.glsl and common/arrivals.glsl
#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"
#if ROPE_PAIRS
#include "rope/rope.glsl"
#endif
#include "rope/slots.glsl"
#if STORE && !STORE_F32
#include "cache/f16_bits.glsl"
#endif

layout(local_size_x = WG_SIZE) in;

#include "common/sentinel.glsl"
#include "common/arrivals.glsl"

#define SLOTS (HEAD_DIM / 4)
#define ROUNDS ((SLOTS + WG_SIZE - 1) / WG_SIZE)
#define BIND_POS (1 + 2 * STORE * (1 - PACKED))
#define BIND_OUT (BIND_POS + 1 + 2 * NORM + FACTORS)

layout(push_constant) uniform Push {
    uint tokens;
    uint n_ctx;
    float eps;
} p;

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InQ { vec2 q[]; };
#if STORE && !PACKED
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InK { vec2 k[]; };
layout(std430, set = 0, binding = 2) SYNC_INPUT buffer InV { vec2 v[]; };
#endif
layout(std430, set = 0, binding = BIND_POS) readonly buffer InPos { int pos[]; };
#ifdef BIND_ROWS
layout(std430, set = 0, binding = BIND_ROWS) readonly buffer InRows { int rows[]; };
#endif
#if NORM
layout(std430, set = 0, binding = BIND_POS + 1) readonly buffer QNorm { vec2 q_norm[]; };
layout(std430, set = 0, binding = BIND_POS + 2) readonly buffer KNorm { vec2 k_norm[]; };
#endif
#if FACTORS
layout(std430, set = 0, binding = BIND_POS + 1 + 2 * NORM) readonly buffer InFactors { float factors[]; };
#endif
layout(std430, set = 0, binding = BIND_OUT) writeonly buffer OutQ { vec2 q_out[]; };
#if STORE && STORE_F32
layout(std430, set = 0, binding = BIND_OUT + 1) writeonly buffer OutK { vec2 k_out[]; };
layout(std430, set = 0, binding = BIND_OUT + 2) writeonly buffer OutV { vec2 v_out[]; };
#elif STORE
layout(std430, set = 0, binding = BIND_OUT + 1) writeonly buffer CacheK { uint cache_k[]; };
layout(std430, set = 0, binding = BIND_OUT + 2) writeonly buffer CacheV { uint cache_v[]; };
#endif

#if ROPE_PAIRS
vec2 angle_of(uint pair, int position) {
#if FACTORS
    return rope_angle(pair, position, factors[pair]);
#else
    return rope_angle(pair, position);
#endif
}
#endif

vec2 load(uint token, uint head, uint place) {
#if PACKED
    return q[(token * (Q_HEADS + 2 * KV_HEADS) + head) * (HEAD_DIM / 2) + place];
#elif STORE
    if (head >= Q_HEADS + KV_HEADS) return v[(token * KV_HEADS + head - Q_HEADS - KV_HEADS) * (HEAD_DIM / 2) + place];
    if (head >= Q_HEADS) return k[(token * KV_HEADS + head - Q_HEADS) * (HEAD_DIM / 2) + place];
    return q[(token * Q_HEADS + head) * (HEAD_DIM / 2) + place];
#else
    return q[(token * Q_HEADS + head) * (HEAD_DIM / 2) + place];
#endif
}

void store(uint token, uint head, uint place, int row, vec2 x) {
    if (head < Q_HEADS) {
        q_out[(token * Q_HEADS + head) * (HEAD_DIM / 2) + place] = x;
        return;
    }
#if STORE && STORE_F32
    if (head < Q_HEADS + KV_HEADS) k_out[(token * KV_HEADS + head - Q_HEADS) * (HEAD_DIM / 2) + place] = x;
    else v_out[(token * KV_HEADS + head - Q_HEADS - KV_HEADS) * (HEAD_DIM / 2) + place] = x;
#elif STORE
    if (row < 0 || uint(row) >= p.n_ctx) return;
    const uint word = f16_bits_of(x);
    if (head < Q_HEADS + KV_HEADS) cache_k[((head - Q_HEADS) * p.n_ctx + uint(row)) * (HEAD_DIM / 2) + place] = word;
    else cache_v[((head - Q_HEADS - KV_HEADS) * p.n_ctx + uint(row)) * (HEAD_DIM / 2) + place] = word;
#endif
}

void main() {
    const uint token = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    if (token >= p.tokens) {
        arrive();
        return;
    }
    const uint t = gl_LocalInvocationID.x;
    const uint first = gl_WorkGroupID.x * HEADS;
    const int position = pos[token];
#ifdef BIND_ROWS
    const int row = rows[token];
#else
    const int row = position;
#endif
#if ROPE_PAIRS
    vec4 angles[ROUNDS];
    if (first < Q_HEADS + KV_HEADS) {
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            if (slot < ROTATED_SLOTS) angles[i] = vec4(angle_of(2u * slot, position), angle_of(2u * slot + 1u, position));
        }
    }
#endif
    for (uint head = first; head < min(first + HEADS, Q_HEADS + 2 * KV_HEADS); head++) {
        vec2 a[ROUNDS], b[ROUNDS];
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            const uvec2 at = places(slot);
            SPIN_UNTIL(a[i] = slot < SLOTS ? load(token, head, at.x) : vec2(0.0); b[i] = slot < SLOTS ? load(token, head, at.y) : vec2(0.0),
                       arrived(a[i]) && arrived(b[i]));
        }
        const bool value = head >= Q_HEADS + KV_HEADS;
#if NORM
        if (!value) {
            float square = 0.0;
            [[unroll]] for (uint i = 0u; i < ROUNDS; i++) square += dot(a[i], a[i]) + dot(b[i], b[i]);
            const float scale = 1.0 / sqrt(wg_sum(square) / float(HEAD_DIM) + p.eps);
            [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
                const uint slot = i * WG_SIZE + t;
                if (slot < SLOTS) {
                    const uvec2 at = places(slot);
                    a[i] *= scale * (head < Q_HEADS ? q_norm[at.x] : k_norm[at.x]);
                    b[i] *= scale * (head < Q_HEADS ? q_norm[at.y] : k_norm[at.y]);
                }
            }
        }
#endif
        [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
            const uint slot = i * WG_SIZE + t;
            if (slot >= SLOTS) continue;
#if ROPE_PAIRS
            if (!value && slot < ROTATED_SLOTS) rotate(a[i], b[i], angles[i]);
#endif
            const uvec2 at = places(slot);
            store(token, head, at.x, row, a[i]);
            store(token, head, at.y, row, b[i]);
        }
    }
    arrive();
}

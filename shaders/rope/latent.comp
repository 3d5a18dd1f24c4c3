#version 450
// MLA: what happens to a token between the products and attention: RoPE of Q and of the key that all heads share, the norm of the latent, and
// the store into the cache. Pairs are neighbours.
//
// Bindings in this order; those in brackets exist with the define:
//   q      F32 [tokens, HEADS, NOPE + ROPE_DIM]; the last ROPE_DIM values of each head are rotated
//   kv     F32 [tokens, RANK + ROPE_DIM]: latent and shared key
//   [LEGACY: kv_heads F32 [tokens, HEADS, NOPE + V_DIM]: for each head the part of K that is not rotated, and V]
//   [not LEGACY: norm F32 [RANK]: weight of the latent's RMS norm]
//   rows   I32 [tokens]: the row of the caches that a token is stored in; -1 or one outside the caches: none
//   angles vec2 [tokens, ROPE_DIM / 2]: (cos, sin) of every pair (rope/angles.comp)
//   q_pe   F32 [tokens, HEADS, ROPE_DIM], out: the rotated values of Q
//   cache_k  F16 [1, n_ctx, RANK + ROPE_DIM]: normed latent, then rotated key. LEGACY: [HEADS, n_ctx, NOPE + ROPE_DIM], and cache_v [HEADS,
//            n_ctx, V_DIM]. STORE_F32: the same rows as F32 [tokens, heads, width], for caches of other types
//
// One thread per pair: first the pairs of q_pe, then (LEGACY) those of the rows of K and V of all heads. Without LEGACY workgroup 0 of a token
// makes its row of K, which needs a sum over the latent, and the pairs of q_pe begin in workgroup 1.
//
// Defines: STORE_F32 HEADS NOPE ROPE_DIM RANK V_DIM LEGACY, those of common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"
#include "cache/f16_bits.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint tokens;
    uint n_ctx;
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InQ { vec2 q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InKv { vec2 kv[]; };
#if LEGACY
layout(std430, set = 0, binding = 2) readonly buffer InKvHeads { vec2 kv_heads[]; };
#else
layout(std430, set = 0, binding = 2) readonly buffer InNorm { vec2 norm[]; };
#endif
layout(std430, set = 0, binding = 3) readonly buffer InRows { int rows[]; };
layout(std430, set = 0, binding = 4) readonly buffer InAngles { vec2 angles[]; };
layout(std430, set = 0, binding = 5) writeonly buffer OutQ { vec2 q_pe[]; };
#if STORE_F32
layout(std430, set = 0, binding = 6) writeonly buffer OutK { vec2 k_out[]; };
#else
layout(std430, set = 0, binding = 6) writeonly buffer CacheK { uint k_out[]; };
#endif
#if LEGACY && STORE_F32
layout(std430, set = 0, binding = 7) writeonly buffer OutV { vec2 v_out[]; };
#elif LEGACY
layout(std430, set = 0, binding = 7) writeonly buffer CacheV { uint v_out[]; };
#endif

// Where row `row` of a head begins in the output, and how two values are stored.
#if STORE_F32
#define ROW_OF(token, row, head, heads) ((token) * (heads) + (head))
#define PACK(pair) (pair)
#else
#define ROW_OF(token, row, head, heads) ((head) * p.n_ctx + uint(row))
#define PACK(pair) f16_bits_of(pair)
#endif

// Pairs per row.
#define NOPE2 (NOPE / 2)
#define ROPE_DIM2 (ROPE_DIM / 2)
#define RANK2 (RANK / 2)
#define V_DIM2 (V_DIM / 2)

// Pair i of a token's rotated dimensions.
vec2 rotate(vec2 pair, uint token, uint i) {
    const vec2 angle = angles[token * ROPE_DIM2 + i];
    return vec2(pair.x * angle.x - pair.y * angle.y, pair.x * angle.y + pair.y * angle.x);
}

vec2 rotate_key(uint token, uint i) { return rotate(kv[token * (RANK2 + ROPE_DIM2) + RANK2 + i], token, i); }

#if !LEGACY
#define ROUNDS ((RANK2 + WG_SIZE - 1) / WG_SIZE)

void store_row(uint t, uint token, int cache_row, bool stores) {
    vec2 latent[ROUNDS];
    float square = 0.0;
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
        const uint at = i * WG_SIZE + t;
        latent[i] = at < RANK2 ? kv[token * (RANK2 + ROPE_DIM2) + at] : vec2(0.0);
        square += dot(latent[i], latent[i]);
    }
    const float scale = inversesqrt(wg_sum(square) / float(RANK) + p.eps);
    if (!stores) return;
    const uint row = ROW_OF(token, cache_row, 0u, 1u) * (RANK2 + ROPE_DIM2);
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
        const uint at = i * WG_SIZE + t;
        if (at < RANK2) k_out[row + at] = PACK(scale * latent[i] * norm[at]);
    }
    for (uint i = t; i < ROPE_DIM2; i += WG_SIZE) k_out[row + RANK2 + i] = PACK(rotate_key(token, i));
}
#endif

void main() {
    const uint token = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    if (token >= p.tokens) return;
    const uint t = gl_LocalInvocationID.x;
    const int cache_row = rows[token];
    const bool stores = cache_row >= 0 && uint(cache_row) < p.n_ctx;
#if LEGACY
    uint pair = gl_WorkGroupID.x * WG_SIZE + t;
#else
    if (gl_WorkGroupID.x == 0) {
        store_row(t, token, cache_row, stores);
        return;
    }
    const uint pair = (gl_WorkGroupID.x - 1u) * WG_SIZE + t;
#endif
    if (pair < HEADS * ROPE_DIM2) {
        const uint head = pair / ROPE_DIM2, i = pair % ROPE_DIM2;
        q_pe[(token * HEADS + head) * ROPE_DIM2 + i] = rotate(q[(token * HEADS + head) * (NOPE2 + ROPE_DIM2) + NOPE2 + i], token, i);
        return;
    }
#if LEGACY
    if (!stores) return;
    pair -= HEADS * ROPE_DIM2;
    if (pair < HEADS * (NOPE2 + ROPE_DIM2)) {
        const uint head = pair / (NOPE2 + ROPE_DIM2), i = pair % (NOPE2 + ROPE_DIM2);
        const vec2 key = i < NOPE2 ? kv_heads[(token * HEADS + head) * (NOPE2 + V_DIM2) + i] : rotate_key(token, i - NOPE2);
        k_out[ROW_OF(token, cache_row, head, HEADS) * (NOPE2 + ROPE_DIM2) + i] = PACK(key);
        return;
    }
    pair -= HEADS * (NOPE2 + ROPE_DIM2);
    if (pair < HEADS * V_DIM2) {
        const uint head = pair / V_DIM2, i = pair % V_DIM2;
        v_out[ROW_OF(token, cache_row, head, HEADS) * V_DIM2 + i] = PACK(kv_heads[(token * HEADS + head) * (NOPE2 + V_DIM2) + NOPE2 + i]);
    }
#endif
}

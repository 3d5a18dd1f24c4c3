// What ATTN_DECODE does before attention: norm and RoPE of the workgroup's queries, and in the workgroup that owns row pos norm and RoPE of the
// key and the store of key and value. The new row is used as it was rounded to F16, so the result is that of storing first and reading back.
//
// NORM_LANES threads share the sum of squares of a head; a thread then turns one pair of dimensions at a time.

layout(binding = 1) writeonly buffer CacheK1 { uint cache_k1[]; };
layout(binding = 2) writeonly buffer CacheV1 { uint cache_v1[]; };
#if HAS_NORM
layout(binding = BIND_Q_NORM) readonly buffer QNorm { float q_norm[]; };
layout(binding = BIND_K_NORM) readonly buffer KNorm { float k_norm[]; };
#endif
#if HAS_FACTORS
layout(binding = BIND_FACTORS) readonly buffer Factors { float factors[]; };
#endif

#include "rope/rope.glsl"

const uint NO_ROW = 0xffffffffu;

shared float raw[(HEADS + 1) * HD];     // the query heads, then the key head
shared float norm_scale[HEADS + 1];
shared uvec4 new_k[COLS], new_v[COLS];
uint new_row = NO_ROW;

void prepare(uint tid, uint head0, uint kv, bool owner) {
    const uint heads = owner ? HEADS + 1 : HEADS;
    for (uint first = 0; first < heads; first += WG_SIZE / NORM_LANES) {
        const uint head = first + tid / NORM_LANES;
        float square = 0.0;
        if (head < heads) {
            const uint from = (head < HEADS ? head0 + head : p.n_head + kv) * (HD / 2);
            for (uint i = tid % NORM_LANES; i < HD / 2; i += NORM_LANES) {
                const vec2 v = qkv2[from + i];
                raw[head * HD + 2 * i] = v.x;
                raw[head * HD + 2 * i + 1] = v.y;
                square += dot(v, v);
            }
        }
#if HAS_NORM
        square = group_sum(square, NORM_LANES);
        if (head < heads && tid % NORM_LANES == 0) norm_scale[head] = inversesqrt(square / float(HD) + p.eps);
#endif
    }
    const int at = pos[0];
    const uint row = uint(at);
    const bool stores = owner && row < p.n_ctx && head0 % (p.n_head / p.n_head_kv) == 0;
    const uint cache_at = (kv * p.n_ctx + row) * (HD / 2);
    if (owner) {
        new_row = row;
        for (uint i = tid; i < HD / 2; i += WG_SIZE) {
            const uint word = packHalf2x16(qkv2[(p.n_head + p.n_head_kv + kv) * (HD / 2) + i]);
            new_v[i >> 2][i & 3] = word;
            if (stores) cache_v1[cache_at + i] = word;
        }
    }
    barrier();
    for (uint i = tid; i < heads * (HD / 2); i += WG_SIZE) {
        const uint head = i / (HD / 2), pair = i % (HD / 2);
        const uvec2 dims = pair < ROPE_PAIRS ? rope_dims(pair) : uvec2(2 * pair, 2 * pair + 1);
        vec2 v = vec2(raw[head * HD + dims.x], raw[head * HD + dims.y]);
#if HAS_NORM
        v *= norm_scale[head];
        v *= head < HEADS ? vec2(q_norm[dims.x], q_norm[dims.y]) : vec2(k_norm[dims.x], k_norm[dims.y]);
#endif
        if (pair < ROPE_PAIRS) {
#if HAS_FACTORS
            v = rope_rotate(v, rope_angle(pair, at, factors[pair]));
#else
            v = rope_rotate(v, rope_angle(pair, at));
#endif
        }
        if (head < HEADS) {
            query4[(head * HD + dims.x) >> 2][dims.x & 3] = p.scale * v.x;
            query4[(head * HD + dims.y) >> 2][dims.y & 3] = p.scale * v.y;
        } else {
            raw[head * HD + dims.x] = v.x;
            raw[head * HD + dims.y] = v.y;
        }
    }
    if (!owner) return;
    barrier();
    for (uint i = tid; i < HD / 2; i += WG_SIZE) {
        const uint word = packHalf2x16(vec2(raw[HEADS * HD + 2 * i], raw[HEADS * HD + 2 * i + 1]));
        new_k[i >> 2][i & 3] = word;
        if (stores) cache_k1[cache_at + i] = word;
    }
}

// Prologue of ATTN_DECODE: norm and RoPE of the workgroup's queries and of the new key, and the store of the new key and value (row pos), by
// the workgroup whose split has that row. Attention uses the new row rounded as it is stored,
// so the result equals storing first and reading back. Without STORES_ROW there are queries alone.
//
// HEAD_LANES neighbouring threads share a head, each with some of its slots (rope/slots.glsl).
// All loads are issued before the first is used, and none depends on pos.
//
//   BIND_ANGLES               vec4 [ROPE_PAIRS / 2]: (cos, sin) of two neighbouring pairs (rope/angles.comp). ROPE_PAIRS 0: no RoPE
//   BIND_Q_NORM, BIND_K_NORM  F32 [HD] (HAS_NORM): weights of the norms; with NORM_ALL F32 [heads * HD], of norms over all heads of Q or K,
//                             whose squares every workgroup adds up by itself
//   NORM_V                    the new value is RMS-normed, without a weight

#include "rope/slots.glsl"
#if STORES_ROW
#include "cache/f16_bits.glsl"

layout(binding = 1) writeonly buffer CacheK1 { uint cache_k1[]; };
layout(binding = 2) writeonly buffer CacheV1 { uint cache_v1[]; };
#endif
#if ROPE_PAIRS
layout(binding = BIND_ANGLES) readonly buffer Angles { vec4 angles[]; };
#endif
#if HAS_NORM
layout(binding = BIND_Q_NORM) readonly buffer QNorm { vec2 q_norm[]; };
#if STORES_ROW
layout(binding = BIND_K_NORM) readonly buffer KNorm { vec2 k_norm[]; };
#endif
#endif

#define WORDS (HD / 2)
#define SLOTS (HD / 4)
#define SLOT_ROUNDS ((SLOTS + HEAD_LANES - 1) / HEAD_LANES)
#define HEADS_AT_ONCE (WG_SIZE / HEAD_LANES)
#define OWN_HEADS (HEADS + STORES_ROW)  // queries, and one key
#define HEAD_ROUNDS ((OWN_HEADS + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE)
#define VALUE_ROUNDS ((WORDS + WG_SIZE - 1) / WG_SIZE)

#if STORES_ROW
// Row pos, which the cache does not hold yet. The workgroup with the last split owns it and processes it before the rows of its split.
shared RAW8 new_k[COLS], new_v[COLS];
bool owns_new;

#define QUANTIZED(TYPE) (TYPE == CACHE_Q8_0 || TYPE == CACHE_Q4_0)

// Stores two values of the new key or value as F16 or F32, in NEW_ROW and in the cache. place: of the pair in its row.
#define PUT_F16(NEW_ROW, WORDS_OF)                                                                                           \
    const uint word = f16_bits_of(v);                                                                                        \
    RAW8_WORDS(NEW_ROW[place >> 2])[place & 3u] = word;                                                                      \
    if (stores) WORDS_OF[(kv * p.n_ctx + row) * WORDS + place] = word;
#define PUT_F32(NEW_ROW, WORDS_OF)                                                                                           \
    const uvec2 words = floatBitsToUint(v);                                                                                  \
    [[unroll]] for (uint i = 0; i < 2; i++) {                                                                                \
        if ((place & 2u) == 0u) NEW_ROW[place >> 2].low[2u * (place & 1u) + i] = words[i];                                   \
        else NEW_ROW[place >> 2].high[2u * (place & 1u) + i] = words[i];                                                     \
        if (stores) WORDS_OF[2u * ((kv * p.n_ctx + row) * WORDS + place) + i] = words[i];                                    \
    }

#if QUANTIZED(K_TYPE) || QUANTIZED(V_TYPE)
#include "encode/unit_bytes.glsl"
#if SCALE_WORDS
// Two units have their scales in one word. Where the device cannot store 16 bits, a thread clears and sets its half of the word by atomics.
#define STORE_SCALE(HALVES, WORDS, at, scale) {                           \
    atomicAnd(WORDS[(at) >> 1], ~(0xffffu << (16u * ((at) & 1u))));       \
    atomicOr(WORDS[(at) >> 1], (scale) << (16u * ((at) & 1u))); }
#else
#extension GL_EXT_shader_16bit_storage : require
layout(binding = 1) writeonly buffer CacheKHalves { uint16_t k_halves[]; };
layout(binding = 2) writeonly buffer CacheVHalves { uint16_t v_halves[]; };
#define STORE_SCALE(HALVES, WORDS, at, scale) HALVES[at] = uint16_t(scale);
#endif
shared vec4 new_kv[2][OUT4];  // the new key and value as floats

// Quantizes the new key (WHICH 0) or value (1) as the cache stores it, eight values per thread.
// Each of the four threads of a unit finds the unit's scale by itself.
#define QUANTIZE(WHICH, TYPE, NEW_ROW, PAIRS, HALVES, WORDS_OF, FIRST)                                                       \
    for (uint i = FIRST; i < COLS; i += WG_SIZE) {                                                                           \
        vec4 v[8];                                                                                                           \
        [[unroll]] for (uint j = 0; j < 8; j++) v[j] = new_kv[WHICH][i / 4u * 8u + j];                                       \
        const float d = unit_scale(v, TYPE), inverse = reciprocal(d);                                                        \
        const uint scale = f16_bits(d), second = (i >> 1) & 1u, from = i / 4u * 8u + 2u * (i & 1u); \
        uvec2 words;                                                                                                         \
        [[unroll]] for (uint j = 0; j < 2; j++)                                                                              \
            words[j] = TYPE == CACHE_Q8_0 ? q8_0_word(new_kv[WHICH][2u * i + j], inverse)                                    \
                                          : q4_0_word(new_kv[WHICH][from + j], new_kv[WHICH][from + 4u + j], inverse);       \
        NEW_ROW[i] = RAW8_OF(uvec4(words, scale, 32u * second));                                                                      \
        if (stores) {                                                                                                        \
            const uint units = p.n_head_kv * p.n_ctx * (COLS / 4u), unit = (kv * p.n_ctx + row) * (COLS / 4u) + i / 4u;      \
            if (TYPE == CACHE_Q8_0) PAIRS[2u * (unit + second * units) + (i & 1u)] = words;                                  \
            else if (second == 0u) PAIRS[2u * unit + (i & 1u)] = words;                                                      \
            const uint at = (TYPE == CACHE_Q8_0 ? 16u : 8u) * units + unit;                                                  \
            if ((i & 3u) == 0u) STORE_SCALE(HALVES, WORDS_OF, at, scale)                                                     \
        }                                                                                                                    \
    }
#endif
#endif

vec2 head_a[HEAD_ROUNDS][SLOT_ROUNDS], head_b[HEAD_ROUNDS][SLOT_ROUNDS];
#if HAS_NORM
vec2 norm_a[HEAD_ROUNDS][SLOT_ROUNDS], norm_b[HEAD_ROUNDS][SLOT_ROUNDS];
#endif
#if ROPE_PAIRS
vec4 slot_angles[SLOT_ROUNDS];
#endif
#if STORES_ROW
vec2 value_words[VALUE_ROUNDS];
#endif

void read_heads(uint tid, uint head0, uint kv) {
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++) {
        const uint head = i * HEADS_AT_ONCE + tid / HEAD_LANES;
        const uint from = (head < HEADS ? head0 + head : STORES_ROW * (p.n_head + kv)) * WORDS;
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uint slot = j * HEAD_LANES + tid % HEAD_LANES;
            const uvec2 at = places(min(slot, SLOTS - 1));
            const bool valid = head < OWN_HEADS && slot < SLOTS;
            head_a[i][j] = valid ? qkv2[from + at.x] : vec2(0.0);
            head_b[i][j] = valid ? qkv2[from + at.y] : vec2(0.0);
        }
    }
#if STORES_ROW
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++)
        value_words[i] = qkv2[(p.n_head + p.n_head_kv + kv) * WORDS + min(i * WG_SIZE + tid, WORDS - 1)];
#endif
}

#if SPINS
bool heads_arrived() {
    bool valid = true;
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++)
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) valid = valid && arrived(head_a[i][j]) && arrived(head_b[i][j]);
#if STORES_ROW
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++) valid = valid && arrived(value_words[i]);
#endif
    return valid;
}
#endif

// Loads angles, norm weights and heads. With SPINS the heads may not have arrived yet; the includer spins on them later.
void prefetch_heads(uint tid, uint head0, uint kv) {
#if ROPE_PAIRS
    [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) slot_angles[j] = angles[min(j * HEAD_LANES + tid % HEAD_LANES, ROTATED_SLOTS - 1)];
#endif
#if HAS_NORM
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++)
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uvec2 at = places(min(j * HEAD_LANES + tid % HEAD_LANES, SLOTS - 1));
            const bool query = i * HEADS_AT_ONCE + tid / HEAD_LANES < HEADS;
#if NORM_ALL
            const uint from = (query ? head0 + i * HEADS_AT_ONCE + tid / HEAD_LANES : kv) * WORDS;
#else
            const uint from = 0u;
#endif
#if STORES_ROW
            norm_a[i][j] = query ? q_norm[from + at.x] : k_norm[from + at.x];
            norm_b[i][j] = query ? q_norm[from + at.y] : k_norm[from + at.y];
#else
            norm_a[i][j] = q_norm[at.x];
            norm_b[i][j] = q_norm[at.y];
#endif
        }
#endif
    read_heads(tid, head0, kv);
}

#if NORM_ALL
#define AT_ONCE 8u
vec2 all_q[AT_ONCE], all_k[AT_ONCE];

void read_all(uint first) {
    const uint q_words = p.n_head * WORDS, k_words = p.n_head_kv * WORDS;
    [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
        const uint at = first + i * WG_SIZE;
        all_q[i] = at < q_words ? qkv2[at] : vec2(0.0);
        all_k[i] = at < k_words ? qkv2[q_words + at] : vec2(0.0);
    }
}

#if SPINS
bool all_arrived() {
    bool valid = true;
    [[unroll]] for (uint i = 0; i < AT_ONCE; i++) valid = valid && arrived(all_q[i]) && arrived(all_k[i]);
    return valid;
}
#endif

// 1 / rms of all heads of Q and of K.
vec2 norms_of_all(uint tid) {
    vec2 square = vec2(0.0);
    for (uint first = tid; first < max(p.n_head, p.n_head_kv) * WORDS; first += AT_ONCE * WG_SIZE) {
        SPIN_UNTIL(read_all(first), all_arrived())
        [[unroll]] for (uint i = 0; i < AT_ONCE; i++) square += vec2(dot(all_q[i], all_q[i]), dot(all_k[i], all_k[i]));
    }
    const vec2 sums = vec2(wg_sum(square.x), wg_sum(square.y));
    return inversesqrt(sums / vec2(HD * p.n_head, HD * p.n_head_kv) + p.eps);
}
#endif

void put_query(uint head, uint place, vec2 v) {
    query4[head * OUT4 + (place >> 1)][2u * (place & 1u)] = p.scale * v.x;
    query4[head * OUT4 + (place >> 1)][2u * (place & 1u) + 1u] = p.scale * v.y;
}

#if STORES_ROW
void put_key(uint kv, uint row, bool stores, uint place, vec2 v) {
#if K_TYPE == CACHE_F16
    PUT_F16(new_k, cache_k1)
#elif K_TYPE == CACHE_F32
    PUT_F32(new_k, cache_k1)
#else
    new_kv[0][place >> 1][2u * (place & 1u)] = v.x;
    new_kv[0][place >> 1][2u * (place & 1u) + 1u] = v.y;
#endif
}

void put_value(uint kv, uint row, bool stores, uint place, vec2 v) {
#if V_TYPE == CACHE_F16
    PUT_F16(new_v, cache_v1)
#elif V_TYPE == CACHE_F32
    PUT_F32(new_v, cache_v1)
#else
    new_kv[1][place >> 1][2u * (place & 1u)] = v.x;
    new_kv[1][place >> 1][2u * (place & 1u) + 1u] = v.y;
#endif
}
#endif

#ifdef PAGE
uint shift_of(uint row);  // attention/pages.glsl
#endif

void prepare(uint tid, uint head0, uint kv) {
#if STORES_ROW
#ifdef PAGE
    // A hole has no page; nothing is stored then.
    const uint row = owns_new ? uint(pos[0]) + shift_of(uint(pos[0])) : 0u;
#else
    const uint row = uint(pos[0]);
#endif
    const bool stores = owns_new && head0 % (p.n_head / p.n_head_kv) == 0;
#endif
#if NORM_ALL
    const vec2 norms = norms_of_all(tid);
#endif
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++) {
        const uint head = i * HEADS_AT_ONCE + tid / HEAD_LANES;
#if NORM_ALL
        const float norm = head < HEADS ? norms.x : norms.y;
#elif HAS_NORM
        float square = 0.0;
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) square += dot(head_a[i][j], head_a[i][j]) + dot(head_b[i][j], head_b[i][j]);
        const float norm = inversesqrt(group_sum(square, HEAD_LANES) / float(HD) + p.eps);
#endif
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uint slot = j * HEAD_LANES + tid % HEAD_LANES;
            vec2 a = head_a[i][j], b = head_b[i][j];
#if HAS_NORM
            a *= norm * norm_a[i][j];
            b *= norm * norm_b[i][j];
#endif
#if ROPE_PAIRS
            if (slot < ROTATED_SLOTS) rotate(a, b, slot_angles[j]);
#endif
            const uvec2 at = places(slot);
            if (slot < SLOTS && head < HEADS) {
                put_query(head, at.x, a);
                put_query(head, at.y, b);
            }
#if STORES_ROW
            else if (slot < SLOTS && head == HEADS) {
                put_key(kv, row, stores, at.x, a);
                put_key(kv, row, stores, at.y, b);
            }
#endif
        }
    }
#if STORES_ROW
#if NORM_V
    float value_square = 0.0;
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++)
        if (i * WG_SIZE + tid < WORDS) value_square += dot(value_words[i], value_words[i]);
    const float value_norm = inversesqrt(wg_sum(value_square) / float(HD) + p.eps);
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++) value_words[i] *= value_norm;
#endif
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++) {
        const uint place = i * WG_SIZE + tid;
        if (place < WORDS) put_value(kv, row, stores, place, value_words[i]);
    }
#if QUANTIZED(K_TYPE) || QUANTIZED(V_TYPE)
    barrier();
    if (!owns_new) return;
  #if QUANTIZED(K_TYPE)
    QUANTIZE(0, K_TYPE, new_k, k2, k_halves, k1, tid)
  #endif
  #if QUANTIZED(V_TYPE)
    QUANTIZE(1, V_TYPE, new_v, v2, v_halves, v1, (WG_SIZE - 1u - tid))
  #endif
#endif
#endif
}

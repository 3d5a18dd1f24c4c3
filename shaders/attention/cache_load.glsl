// Reads the KV cache eight values at a time: load_k8 and load_v8 load the stored bits (one to three loads,
// none of which waits for another); decode_low4 and decode_high4 decode them later.
//
//   uvec4 load_k8(uint i)                    values 8 i .. 8 i + 7 of K's cache, rows one after the other; load_v8: of V's
//   vec4 decode_low4(uvec4 raw, uint type)   the first four values
//   vec4 decode_high4(uvec4 raw, uint type)  the other four
//
// F16: 16 bytes. Q8_0 and Q4_0 lie in the planes of docs/weight_layout.md: 8 bytes of quants, of which Q4_0 uses either the low or the high
// nibbles, and the word that holds the scale. They need rows of whole units (32 values).
//
// The including shader has K_TYPE and V_TYPE (CACHE_*), K_PITCH and V_PITCH (groups of eight values from row to row), push constants `p` with
// n_head_kv and n_ctx, and the caches as uvec4 k4[], uvec2 k2[], uint k1[], and v4[], v2[], v1[].

#define CACHE_F16 0
#define CACHE_Q8_0 1
#define CACHE_Q4_0 2

#define LOAD8(W4, W2, W1, TYPE, PITCH)                                                                                       \
    if (TYPE == CACHE_F16) return W4[i];                                                                                     \
    const uint unit = i >> 2, second = (i >> 1) & 1u, units = p.n_head_kv * p.n_ctx * (PITCH / 4u);                          \
    const uvec2 quants = W2[2u * (TYPE == CACHE_Q8_0 ? unit + second * units : unit) + (i & 1u)];                            \
    return uvec4(quants, W1[(TYPE == CACHE_Q8_0 ? 8u : 4u) * units + (unit >> 1)], 16u * (unit & 1u) + 32u * second);

uvec4 load_k8(uint i) { LOAD8(k4, k2, k1, K_TYPE, K_PITCH) }
uvec4 load_v8(uint i) { LOAD8(v4, v2, v1, V_TYPE, V_PITCH) }

// Decodes four values of raw.x or raw.y (`word`). raw.w says which scale and which nibbles. The high nibbles of Q4_0 have their top bit
// flipped: masked in place, they are int8 of 16 times the value.
vec4 decode_quantized4(uvec4 raw, uint word, uint type) {
    const float d = unpackHalf2x16(raw.z >> (raw.w & 16u)).x;
    if (type == CACHE_Q8_0) return d * vec4(int(word << 24) >> 24, int(word << 16) >> 24, int(word << 8) >> 24, int(word) >> 24);
    const uint high = ((raw.w & 32u) != 0u ? word : (word << 4) ^ 0x80808080u) & 0xf0f0f0f0u;
    return d * 0.0625 * vec4(int(high << 24) >> 24, int(high << 16) >> 24, int(high << 8) >> 24, int(high) >> 24);
}

vec4 decode_low4(uvec4 raw, uint type) {
    return type == CACHE_F16 ? vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y)) : decode_quantized4(raw, raw.x, type);
}

vec4 decode_high4(uvec4 raw, uint type) {
    return type == CACHE_F16 ? vec4(unpackHalf2x16(raw.z), unpackHalf2x16(raw.w)) : decode_quantized4(raw, raw.y, type);
}

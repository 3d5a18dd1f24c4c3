// Eight values of the KV cache as a kernel holds them in registers before it decodes them, for caches of all types:
//
//   RAW8 fetch_k8(uint i)                  values 8 i .. 8 i + 7 of K's cache, as stored; fetch_v8: of V's
//   vec4 decode_low(RAW8 raw, uint type)   the first four values
//   vec4 decode_high(RAW8 raw, uint type)  the other four
//   RAW8_OF(words)                         the same of one uvec4, for types other than F32
//   RAW8_IF(condition, raw)                raw, or zeros
//   RAW8_WORDS(raw)                        its first 16 bytes
//
// F32 takes 32 bytes, all other types 16 (attention/cache_load.glsl, which says what the including shader has). Kernels with an F32 cache
// hold twice the registers.
#include "attention/cache_load.glsl"

#define CACHE_F32 3

#if K_TYPE == CACHE_F32 || V_TYPE == CACHE_F32
struct Raw8 {
    uvec4 low, high;  // F32: four values each; other types: high is unused
};
#define RAW8 Raw8
#define RAW8_OF(WORDS) Raw8(WORDS, uvec4(0u))
#define RAW8_WORDS(RAW) RAW.low
#define RAW8_IF(CONDITION, RAW) Raw8((CONDITION) ? RAW.low : uvec4(0u), (CONDITION) ? RAW.high : uvec4(0u))

Raw8 fetch_k8(uint i) {
#if K_TYPE == CACHE_F32
    return Raw8(k4[2u * i], k4[2u * i + 1u]);
#else
    return Raw8(load_k8(i), uvec4(0u));
#endif
}

Raw8 fetch_v8(uint i) {
#if V_TYPE == CACHE_F32
    return Raw8(v4[2u * i], v4[2u * i + 1u]);
#else
    return Raw8(load_v8(i), uvec4(0u));
#endif
}

vec4 decode_low(Raw8 raw, uint type) { return type == CACHE_F32 ? uintBitsToFloat(raw.low) : decode_low4(raw.low, type); }
vec4 decode_high(Raw8 raw, uint type) { return type == CACHE_F32 ? uintBitsToFloat(raw.high) : decode_high4(raw.low, type); }
#else
#define RAW8 uvec4
#define RAW8_OF(WORDS) (WORDS)
#define RAW8_WORDS(RAW) RAW
#define RAW8_IF(CONDITION, RAW) ((CONDITION) ? RAW : uvec4(0u))
#define fetch_k8 load_k8
#define fetch_v8 load_v8
#define decode_low decode_low4
#define decode_high decode_high4
#endif

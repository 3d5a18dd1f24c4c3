// Encoders of the types in units of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, and NVFP4,
// where a unit is half a block. The rules are those of vkback/quants.
#include "encode/levels.glsl"

// Stores nibbles: q[j] in the low one and q[j + 16] in the high one of byte j. flip: xor of each word.
void put_nibbles(uint q[32], uint unit, uint flip) {
    for (uint w = 0u; w < 4u; w++) {
        uint word = 0u;
        for (uint b = 0u; b < 4u; b++) word |= ((q[4u * w + b] & 15u) | (q[16u + 4u * w + b] & 15u) << 4) << (8u * b);
        put_word(0u, 4u * unit + w, word ^ flip);
    }
}

// The word whose bit 8b + i is bit k of value 4i + b.
uint bits_of(uint q[32], uint k) {
    uint word = 0u;
    for (uint j = 0u; j < 32u; j++) word |= (q[j] >> k & 1u) << (8u * (j & 3u) + (j >> 2));
    return word;
}

void encode(uint unit) {
#if defined(TYPE_Q4_0) || defined(TYPE_Q8_0)
    vec4 quads[8];
    for (uint w = 0u; w < 8u; w++) quads[w] = vec4(v[4u * w], v[4u * w + 1u], v[4u * w + 2u], v[4u * w + 3u]);
  #if defined(TYPE_Q8_0)
    const float scale = unit_scale(quads, CACHE_Q8_0), steps = reciprocal(scale);
    for (uint w = 0u; w < 8u; w++) put_word(w < 4u ? 0u : p.part, 4u * unit + (w & 3u), q8_0_word(quads[w], steps));
  #else
    const float scale = unit_scale(quads, CACHE_Q4_0), steps = reciprocal(scale);
    for (uint w = 0u; w < 4u; w++) put_word(0u, 4u * unit + w, q4_0_word(quads[w], quads[w + 4u], steps));
  #endif
    put(p.plane[0], unit, 16u, half_bits(scale));
#else
    uint q[32];
    float low = v[0], high = v[0], extreme = v[0];
    for (uint j = 1u; j < 32u; j++) {
        low = min(low, v[j]);
        high = max(high, v[j]);
        extreme = abs(v[j]) > abs(extreme) ? v[j] : extreme;
    }
#if defined(TYPE_Q5_0)
    const float top = LEVELS / 2.0;
    const float d = extreme / -top;
    const float inverse = reciprocal(d);
    for (uint j = 0u; j < 32u; j++) q[j] = uint(clamp(trunc(v[j] * inverse + (top + 0.5)), 0.0, LEVELS - 1.0));
#elif defined(TYPE_Q4_1) || defined(TYPE_Q5_1)
    const float d = (high - low) / (LEVELS - 1.0);
    const float inverse = reciprocal(d);
    for (uint j = 0u; j < 32u; j++) q[j] = uint(clamp(trunc((v[j] - low) * inverse + 0.5), 0.0, LEVELS - 1.0));
#endif
#if defined(TYPE_Q4_1)
    put_nibbles(q, unit, 0x80808080u);
    put_word(p.plane[0], unit, half_bits(d) | half_bits(low) << 16);
#elif defined(TYPE_Q5_0)
    put_nibbles(q, unit, 0u);
    put_word(p.plane[0], unit, bits_of(q, 4u));
    put(p.plane[1], unit, 16u, half_bits(d));
#elif defined(TYPE_Q5_1)
    put_nibbles(q, unit, 0u);
    put_word(p.plane[0], unit, bits_of(q, 4u));
    put_word(p.plane[1], unit, half_bits(d) | half_bits(low) << 16);
#elif defined(TYPE_IQ4_NL)
    const float d = as_half(fit_scale(0u, 32u));
    const float inverse = reciprocal(d);
    for (uint j = 0u; j < 32u; j++) q[j] = nearest_code(v[j] * inverse);
    for (uint k = 0u; k < 4u; k++) {
        uint word = 0u;
        for (uint j = 0u; j < 32u; j++) word |= iq4_bits(q[j], j, k);
        put_word(0u, 4u * unit + k, word);
    }
    put(p.plane[0], unit, 16u, half_bits(d));
#elif defined(TYPE_MXFP4)
    // The exponent of the largest magnitude minus that of 4, the largest power of two among the levels.
    const uint e = uint(max(int(floatBitsToUint(abs(extreme)) >> 23) - 2, 0));
    const float e2m1_scale = uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
    for (uint j = 0u; j < 32u; j++) q[j] = nearest_e2m1(v[j], e2m1_scale);
    put_nibbles(q, unit, 0u);
    put(p.plane[0], unit, 8u, e);
#elif defined(TYPE_NVFP4)
    uint scales = 0u;
    for (uint h = 0u; h < 2u; h++) {
        float amax = 0.0;
        for (uint j = 0u; j < 16u; j++) amax = max(amax, abs(v[16u * h + j]));
        const uint code = ue4m3(amax / 6.0);
        scales |= code << (8u * h);
        const float half_scale = code < 8u ? float(code) / 1024.0 : uintBitsToFloat((code << 20) + (119u << 23));
        for (uint j = 0u; j < 16u; j++) q[16u * h + j] = nearest_e2m1(v[16u * h + j], half_scale);
    }
    put_nibbles(q, unit, 0u);
    put(p.plane[0], unit, 16u, scales);
#endif
#endif
}

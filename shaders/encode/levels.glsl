// Levels of a type, and the scale for which they fit given values best. "In steps" means divided by the scale.
//
//   float nearest(float steps)         the level nearest to a value, both in steps
//   uint nearest_code(float steps)     its code on the device
//   float fit_scale(first, count)      the scale d that minimizes the squared error of d * nearest(v / d) over values first .. of v: tries
//                                      TARGETS places for the extreme value and solves for d at each rounding met,
//                                      as vkback/quants/search.py does
#ifdef ORDER_LOW
// The device's code for a code of the file: IQ4_ORDER in vkback/quants/iq.py, E2M1_ORDER in vkback/quants/mx.py.
uint device_code(uint code) {
    const uvec2 order = uvec2(ORDER_LOW, ORDER_HIGH);
    return (order[code >> 3] >> (4u * (code & 7u))) & 15u;
}
#endif

#if defined(TYPE_IQ4_NL) || defined(TYPE_IQ4_XS)
const float iq4[16] = float[](-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0);
uint nearest_number(float steps) {
    uint number = 0u;
    for (uint half_size = 8u; half_size > 0u; half_size >>= 1)
        if (2.0 * steps >= iq4[number + half_size - 1u] + iq4[number + half_size]) number += half_size;
    return number;
}
float nearest(float steps) { return iq4[nearest_number(steps)]; }
uint nearest_code(float steps) { return device_code(nearest_number(steps)); }

// What the code of value j adds to word `word` of its unit (shaders/quant/iq4_levels.glsl).
uint iq4_bits(uint code, uint j, uint word) {
#ifdef CODE_PAIRS
    return (j >> 2 & 3u) == word ? code << (16u * (j >> 4) + 8u * (j & 1u) + 4u * (j >> 1 & 1u)) : 0u;
#else
    return (code >> word & 1u) << (8u * (j & 3u) + (j >> 2));
#endif
}
#define TARGETS 27
float target(int i) { return i < 16 ? -140.0 + 3.0 * float(i) : 100.0 + 3.0 * float(i - 16); }
#elif defined(TYPE_Q3_K)
float nearest(float steps) { return clamp(roundEven(steps), -4.0, 3.0); }
#define TARGETS 29
float target(int i) { return -4.9 + 0.1 * float(i); }
#elif defined(TYPE_Q6_K)
float nearest(float steps) { return clamp(roundEven(steps), -32.0, 31.0); }
#define TARGETS 19
float target(int i) { return -33.8 + 0.2 * float(i); }
#endif

#ifdef TARGETS
float fit_scale(uint first, uint count) {
    float high = v[first], low = v[first];
    for (uint j = 1u; j < count; j++) {
        high = max(high, v[first + j]);
        low = min(low, v[first + j]);
    }
    const float inverse = reciprocal(high > -low ? high : low);
    float best_gain = 0.0, best = 0.0;
    for (int i = 0; i < TARGETS + 2; i++) {
        const float inverse_step = i < TARGETS ? inverse * target(i) : reciprocal(best);
        float xl = 0.0, ll = 0.0;
        for (uint j = 0u; j < count; j++) {
            const float level = nearest(v[first + j] * inverse_step);
            xl += v[first + j] * level;
            ll += level * level;
        }
        const float fitted = xl * reciprocal(ll);
        if (xl * fitted > best_gain) {
            best_gain = xl * fitted;
            best = fitted;
        }
    }
    return best;
}
#endif

#if defined(TYPE_MXFP4) || defined(TYPE_NVFP4)
// The device's nibble for the level nearest to v / e2m1_scale (levels 0 1 2 3 4 6 8 12); ties go to the smaller.
uint nearest_e2m1(float v, float e2m1_scale) {
    const float middles[7] = float[](0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0);
    uint code = 0u;
    if (e2m1_scale > 0.0)
        for (uint i = 0u; i < 7u; i++) code += abs(v) > middles[i] * e2m1_scale ? 1u : 0u;
    if (code > 0u && v < 0.0) code += 8u;
    return device_code(code);
}

// The nearest UE4M3 number: 4 exponent bits (bias 7), 3 fraction bits, at most 448; ties go to the even code.
uint ue4m3(float d) {
    if (d < 0.015625) return uint(roundEven(d * 512.0));
    const uint bits = floatBitsToUint(d);
    return min((bits + 0x7ffffu + ((bits >> 20) & 1u)) / 0x100000u - 960u, 126u);
}
#endif

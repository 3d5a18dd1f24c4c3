// Encoders of the types with blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0; and of Q1_0 (blocks of 128) and Q2_0
// (64). Each group's step (and offset) is fitted by least squares, then rounded to a multiple of the block's own scale. Thread g fits group g;
// for packing, thread u takes unit u, or thread w word w. Bit orders are those of docs/weight_layout.md.
#include "encode/levels.glsl"

#if defined(TYPE_Q2_K) || defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
// Least-squares step and offset (at most 0) for which step * q + offset, q in 0..MAX_LEVEL, fits `count` values best, over all roundings tried.
vec2 fit_affine(uint first, uint count) {
    float high = v[first], low = min(v[first], 0.0), sx = 0.0;
    for (uint j = 0u; j < count; j++) {
        high = max(high, v[first + j]);
        low = min(low, v[first + j]);
        sx += v[first + j];
    }
    const float sw = float(count), inverse_range = reciprocal(high - low);
    vec2 best = vec2(0.0, min(sx / sw, 0.0));
    float best_error = 0.0;
    for (uint j = 0u; j < count; j++) best_error += (v[first + j] - best.y) * (v[first + j] - best.y);
    for (int i = 0; i < SPREADS; i++) {
        const float inverse = inverse_range * (MAX_LEVEL + SPREAD_FIRST + 0.1 * float(i));
        float sq = 0.0, sqq = 0.0, sxq = 0.0;
        for (uint j = 0u; j < count; j++) {
            const float q = clamp(roundEven((v[first + j] - low) * inverse), 0.0, MAX_LEVEL);
            sq += q;
            sqq += q * q;
            sxq += v[first + j] * q;
        }
        const float determinant = sw * sqq - sq * sq;
        vec2 found = vec2((sxq - low * sq) * reciprocal(sqq), low);
        if (determinant > 4e-6 * sw * sqq) found = vec2(sw * sxq - sx * sq, sqq * sx - sq * sxq) / determinant;
        if (found.y > 0.0) found = vec2(sxq * reciprocal(sqq), 0.0);
        float error = 0.0;
        for (uint j = 0u; j < count; j++) {
            const float off = found.x * clamp(roundEven((v[first + j] - low) * inverse), 0.0, MAX_LEVEL) + found.y - v[first + j];
            error += off * off;
        }
        if (error < best_error && found.x > 0.0) {
            best_error = error;
            best = found;
        }
    }
    return best;
}
#endif

#if defined(TYPE_Q2_K) || defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
#define AFFINE 1
#else
#define AFFINE 0
#endif

shared uint q[BLOCK];
#ifdef GROUPS
shared uint scale[GROUPS];
shared uint low[GROUPS];
shared vec2 fits[GROUPS];    // step, offset
#endif

void encode(uint block) {
    const uint thread = gl_LocalInvocationID.x;
#if defined(TYPE_Q1_0)
    float d = 0.0;
    for (uint j = 0u; j < BLOCK; j++) d += abs(v[j]);
    d /= float(BLOCK);
    for (uint j = thread; j < BLOCK; j += WG_SIZE) q[j] = v[j] >= 0.0 ? 1u : 0u;
#elif defined(TYPE_TQ1_0) || defined(TYPE_TQ2_0) || defined(TYPE_Q2_0)
    float d = 0.0;
    for (uint j = 0u; j < BLOCK; j++) d = max(d, abs(v[j]));
    const float inverse = reciprocal(d);
    for (uint j = thread; j < BLOCK; j += WG_SIZE) {
        const float steps = v[j] * inverse;
        q[j] = uint(1.0 + sign(steps) * floor(abs(steps) + 0.5));
    }
#else
    const uint count = 256u / GROUPS;
    float d = 0.0, dmin = 0.0;
#if AFFINE
    for (uint g = thread; g < GROUPS; g += WG_SIZE) fits[g] = fit_affine(g * count, count);
    barrier();
    for (uint g = 0u; g < GROUPS; g++) {
        d = max(d, fits[g].x);
        dmin = max(dmin, -fits[g].y);
    }
    d = as_half(d / MAX_SCALE);
    dmin = as_half(dmin / MAX_SCALE);
    for (uint g = thread; g < GROUPS; g += WG_SIZE) {
        scale[g] = uint(clamp(roundEven(fits[g].x * reciprocal(d)), 0.0, MAX_SCALE));
        low[g] = uint(clamp(roundEven(-fits[g].y * reciprocal(dmin)), 0.0, MAX_SCALE));
        const float inverse = reciprocal(d * float(scale[g])), lift = dmin * float(low[g]);
        for (uint j = g * count; j < (g + 1u) * count; j++) q[j] = uint(clamp(roundEven((v[j] + lift) * inverse), 0.0, MAX_LEVEL));
    }
#else
    for (uint g = thread; g < GROUPS; g += WG_SIZE) fits[g].x = fit_scale(g * count, count);
    barrier();
    float widest = 0.0;
    for (uint g = 0u; g < GROUPS; g++) widest = abs(fits[g].x) > abs(widest) ? fits[g].x : widest;
    d = as_half(widest / MIN_SCALE);
    for (uint g = thread; g < GROUPS; g += WG_SIZE) {
        const float s = clamp(roundEven(fits[g].x * reciprocal(d)), MIN_SCALE, -MIN_SCALE - 1.0);
        scale[g] = uint(int(s - MIN_SCALE));    // from 0
        const float inverse = reciprocal(d * s);
        for (uint j = g * count; j < (g + 1u) * count; j++) {
#if defined(TYPE_IQ4_XS)
            q[j] = nearest_code(v[j] * inverse);
#else
            q[j] = uint(int(nearest(v[j] * inverse) + ZERO));
#endif
        }
    }
#endif
#endif
    barrier();
    // FIELD: the bits of q[FROM] from bit SHIFT on that MASK selects, moved to bit TO of a byte.
    // Value j = 4w + b of a unit goes to byte b of word w.
#define FIELD(FROM, SHIFT, MASK, TO) (((q[FROM] >> (SHIFT)) & (MASK)) << (TO))
    for (uint u = thread; u < BLOCK / 32u; u += WG_SIZE) {
        const uint unit = BLOCK / 32u * block + u, at = 32u * u;
#if defined(TYPE_Q4_K)
        for (uint w = 0u; w < 4u; w++) {
            uint word = 0u;
            for (uint b = 0u; b < 4u; b++) word |= (FIELD(at + 4u * w + b, 0u, 15u, 0u) | FIELD(at + 16u + 4u * w + b, 0u, 15u, 4u)) << (8u * b);
            put_word(0u, 4u * unit + w, word ^ 0x80808080u);
        }
#elif defined(TYPE_IQ4_XS)
        for (uint k = 0u; k < 4u; k++) {
            uint word = 0u;
            for (uint j = 0u; j < 32u; j++) word |= iq4_bits(q[at + j], j, k);
            put_word(0u, 4u * unit + k, word);
        }
#elif defined(TYPE_Q2_K)
        for (uint w = 0u; w < 2u; w++) {
            uint word = 0u;
            for (uint b = 0u; b < 4u; b++) {
                const uint j = at + 8u * w + b;
                word |= (FIELD(j, 0u, 3u, 0u) | FIELD(j + 16u, 0u, 3u, 2u) | FIELD(j + 4u, 0u, 3u, 4u) | FIELD(j + 20u, 0u, 3u, 6u)) << (8u * b);
            }
            put_word(0u, 2u * unit + w, word);
        }
        put(p.plane[0], unit, 16u, scale[2u * u] | low[2u * u] << 4 | scale[2u * u + 1u] << 8 | low[2u * u + 1u] << 12);
#elif defined(TYPE_Q3_K)
        uvec3 words = uvec3(0u);
        for (uint b = 0u; b < 4u; b++) {
            const uint j = at + b;
            for (uint w = 0u; w < 3u; w++) words[w] |= (FIELD(j + 4u * w, 0u, 7u, 0u) | FIELD(j + 16u + 4u * w, 0u, 7u, 3u)) << (8u * b);
            words.x |= FIELD(j + 12u, 0u, 3u, 6u) << (8u * b);
            words.y |= (FIELD(j + 12u, 2u, 1u, 6u) | FIELD(j + 28u, 2u, 1u, 7u)) << (8u * b);
            words.z |= FIELD(j + 28u, 0u, 3u, 6u) << (8u * b);
        }
        put_word(0u, 2u * unit, words.x);
        put_word(0u, 2u * unit + 1u, words.y);
        put_word(p.plane[0], unit, words.z);
#elif defined(TYPE_Q5_K)
        uint words[5] = uint[](0u, 0u, 0u, 0u, 0u);
        for (uint b = 0u; b < 4u; b++) {
            const uint j = at + b;
            for (uint w = 0u; w < 5u; w++) words[w] |= FIELD(j + 4u * w, 0u, 31u, 0u) << (8u * b);
            for (uint i = 0u; i < 3u; i++) words[2u * i] |= FIELD(j + 20u + 4u * i, 0u, 7u, 5u) << (8u * b);
            words[1] |= (FIELD(j + 20u, 3u, 3u, 5u) | FIELD(j + 28u, 3u, 1u, 7u)) << (8u * b);
            words[3] |= (FIELD(j + 24u, 3u, 3u, 5u) | FIELD(j + 28u, 4u, 1u, 7u)) << (8u * b);
        }
        for (uint w = 0u; w < 4u; w++) put_word(0u, 4u * unit + w, words[w]);
        put_word(p.plane[0], unit, words[4]);
#elif defined(TYPE_Q6_K)
        uint words[6] = uint[](0u, 0u, 0u, 0u, 0u, 0u);
        for (uint b = 0u; b < 4u; b++)
            for (uint w = 0u; w < 6u; w++) {
                const uint j = at + 16u * (w / 3u) + b;
                words[w] |= (FIELD(j + 4u * (w % 3u), 0u, 63u, 0u) | FIELD(j + 12u, 2u * (w % 3u), 3u, 6u)) << (8u * b);
            }
        for (uint w = 0u; w < 4u; w++) put_word(0u, 4u * unit + w, words[w]);
        put_word(p.plane[0], 2u * unit, words[4]);
        put_word(p.plane[0], 2u * unit + 1u, words[5]);
        put(p.plane[1], unit, 16u, ((scale[2u * u] - 128u) & 0xffu) | ((scale[2u * u + 1u] - 128u) & 0xffu) << 8);
#elif defined(TYPE_Q1_0)
        uint word = 0u;
        for (uint j = 0u; j < 32u; j++) word |= q[at + j] << (8u * (j & 3u) + (j >> 2));
        put_word(0u, unit, word);
#elif defined(TYPE_TQ2_0) || defined(TYPE_Q2_0)
        for (uint w = 0u; w < 2u; w++) {
            uint word = 0u;
            for (uint j = 0u; j < 16u; j++) word |= q[at + 16u * w + j] << (8u * (j & 3u) + 2u * (j >> 2));
            put_word(0u, 2u * unit + w, word);
        }
#endif
    }
#if !defined(TYPE_TQ1_0)
    if (thread != 0u) return;
#endif
#if defined(TYPE_Q2_K)
    put_word(p.plane[1], block, half_bits(d) | half_bits(dmin) << 16);
#elif defined(TYPE_Q3_K)
    uvec3 scales = uvec3(0u);
    for (uint s = 0u; s < 16u; s++) {
        scales[s >> 3] |= (scale[s] & 15u) << (4u * (s & 7u));
        scales.z |= (scale[s] >> 4) << (2u * s);
    }
    for (uint w = 0u; w < 3u; w++) put_word(p.plane[1], 3u * block + w, scales[w]);
    put(p.plane[2], block, 16u, half_bits(d));
#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
    uvec4 head = uvec4(half_bits(d) | half_bits(dmin) << 16, 0u, 0u, 0u);
    for (uint j = 0u; j < 8u; j++) {
        head[1u + (j >> 2)] |= ((scale[j] & 15u) | (low[j] & 15u) << 16) << (4u * (j & 3u));
        head.w |= (scale[j] >> 4 | low[j] >> 4 << 16) << (2u * j);
    }
#if defined(TYPE_Q4_K)
    for (uint w = 0u; w < 4u; w++) put_word(p.plane[0], 4u * block + w, head[w]);
#else
    for (uint w = 0u; w < 4u; w++) put_word(p.plane[1], 4u * block + w, head[w]);
#endif
#elif defined(TYPE_Q6_K)
    put(p.plane[2], block, 16u, half_bits(d));
#elif defined(TYPE_IQ4_XS)
    uint high = 0u, lows = 0u;
    for (uint j = 0u; j < 8u; j++) {
        high |= (scale[j] >> 4) << (2u * j);
        lows |= (scale[j] & 15u) << (4u * j);
    }
    put_word(p.plane[0], 2u * block, half_bits(d) | high << 16);
    put_word(p.plane[0], 2u * block + 1u, lows);
#elif defined(TYPE_TQ2_0) || defined(TYPE_Q1_0) || defined(TYPE_Q2_0)
    put(p.plane[0], block, 16u, half_bits(d));
#elif defined(TYPE_TQ1_0)
    // Five base-3 digits per byte, as a fraction in 256ths, rounded up; the last four bytes have four digits.
    for (uint w = thread; w < 13u; w += WG_SIZE) {
        uint word = 0u;
        for (uint b = 0u; b < 4u; b++) {
            const uint l = 4u * w + b;
            uint digits = 0u;
            for (uint m = 0u; m < 5u; m++) {
                const uint j = l < 32u ? 32u * m + l : l < 48u ? 160u + 16u * m + l - 32u : 240u + 4u * m + l - 48u;
                digits = 3u * digits + (l < 48u || m < 4u ? q[j] : 0u);
            }
            word |= ((digits * 256u + 242u) / 243u) << (8u * b);
        }
        put_word(w < 12u ? (w >> 2) * p.part : p.plane[0], w < 12u ? 4u * block + (w & 3u) : block, word);
    }
    if (thread == 0u) put(p.plane[1], block, 16u, half_bits(d));
#endif
}

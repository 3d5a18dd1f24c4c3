// Decodes a unit of 32 weights to f16 in K order (gemm/matrix.glsl), eight to a 16-byte word.
// Needs quant/place.glsl, a QUANT_FILE and gemm/pack.glsl.
//
//   unit_f16(unit, valid, words)  the weights times 1 / UNIT_F16_SCALE; with `valid` false zeros
//
// Types whose weights are scale * integer - bias have two decoders, and in both two weights are decoded per 32-bit instruction:
//
//   SUBNORMALS 0  An f16 between 1024 and 2048 has a last bit worth 1. So an integer n < 1024 needs no conversion: (n | bits of 1024) is the f16
//                 1024 + n, and subtracting 1024 is exact.
//   SUBNORMALS 1  The integer as it is, n < 1024 in the lower bits of an f16, is a subnormal number: n * 2^-24. Nothing is subtracted. A scale
//                 2^18 times as large makes it 2^-6 of the weight, of which few are subnormal themselves. The scale must be less than 1/4,
//                 and the device must keep subnormal numbers, in matrices too.
//
// Other types are decoded to floats and rounded. A type may bring a second decoder of its own (UNIT_SUBNORMAL, unit_subnormal).
layout(constant_id = 60) const uint SUBNORMALS = 0;

#if defined(UNIT_FLIPPED_NIBBLES) || UNIT_INTS
const float UNIT_F16_SCALE = SUBNORMALS != 0 ? 64.0 : 1.0;
#else
const float UNIT_F16_SCALE = 1.0;
#endif

// 1024 twice as f16.
uint two_1024() { return 0x64006400u ^ unknown_zero(); }

#ifdef UNIT_FLIPPED_NIBBLES
// Nibbles straight from the word: a nibble in bits 0..3 of an f16 above 1024 adds its value,
// one in bits 4..7 adds 16 times its value. Both subtractions are exact.
f16vec2 low_nibbles(uint word) {
    return unpackFloat2x16((word & 0x000f000fu) | two_1024()) - f16vec2(1024.0);
}

f16vec2 high_nibbles(uint word) {  // their top bits were flipped at load; the xor flips them back
    return fma(unpackFloat2x16((word & 0x00f000f0u) ^ (two_1024() ^ 0x00800080u)), f16vec2(0.0625), f16vec2(-64.0));
}

void unit_f16_normal(UnitRaw unit, bool valid, out uvec4 words[4]) {
#ifdef UNIT_SCALE_F16
    f16vec2 both = unit_scale_f16(unit);
    if (!valid) both = f16vec2(0.0);
    const f16vec2 s = both.xx, b = -both.yy;
#else
    vec2 scale, bias;
    unit_scale(unit, scale, bias);
    if (!valid) scale = bias = vec2(0.0);
    const f16vec2 s = f16vec2(scale), b = -f16vec2(bias);
#endif
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint even = unit.qs[i], odd = even >> 8, at = 2u * (i & 1u);
        words[i >> 1][at] = packFloat2x16(fma(low_nibbles(even), s, b));
        words[i >> 1][at + 1u] = packFloat2x16(fma(low_nibbles(odd), s, b));
        words[2u + (i >> 1)][at] = packFloat2x16(fma(high_nibbles(even), s, b));
        words[2u + (i >> 1)][at + 1u] = packFloat2x16(fma(high_nibbles(odd), s, b));
    }
}

// A nibble in bits 4..7 is 16 times as large as one in bits 0..3.
void unit_f16_subnormal(UnitRaw unit, bool valid, out uvec4 words[4]) {
#ifdef UNIT_SCALE_F16
    f16vec2 both = unit_scale_subnormal(unit);
#else
    vec2 scale, bias;
    unit_scale(unit, scale, bias);
    f16vec2 both = f16vec2(scale.x * 262144.0, bias.x * -0.015625);
#endif
    if (!valid) both = f16vec2(0.0);
    const f16vec2 s = both.xx, s_high = both.xx * f16vec2(0.0625), b = both.yy;
    const uint flip = hidden(0x00800080u);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint even = unit.qs[i], odd = even >> 8, at = 2u * (i & 1u);
        words[i >> 1][at] = packFloat2x16(fma(unpackFloat2x16(even & 0x000f000fu), s, b));
        words[i >> 1][at + 1u] = packFloat2x16(fma(unpackFloat2x16(odd & 0x000f000fu), s, b));
        words[2u + (i >> 1)][at] = packFloat2x16(fma(unpackFloat2x16((even & 0x00f000f0u) ^ flip), s_high, b));
        words[2u + (i >> 1)][at + 1u] = packFloat2x16(fma(unpackFloat2x16((odd & 0x00f000f0u) ^ flip), s_high, b));
    }
}
#elif UNIT_INTS
// Bytes 0 and 2 of a word as f16.
f16vec2 bytes_to_f16(uint word) {
#if UNIT_SIGNED  // flipping the top bit of a signed byte adds 128
    return unpackFloat2x16((word & 0x00ff00ffu) ^ (two_1024() ^ 0x00800080u)) - f16vec2(1152.0);
#else
    return unpackFloat2x16((word & 0x00ff00ffu) | two_1024()) - f16vec2(1024.0);
#endif
}

uint scale_bytes(uint word, f16vec2 scale, f16vec2 bias) {
#if UNIT_BIAS
    return packFloat2x16(fma(bytes_to_f16(word), scale, -bias));
#else
    return packFloat2x16(bytes_to_f16(word) * scale);
#endif
}

// bias: what is added.
uint scale_subnormals(uint word, f16vec2 scale, f16vec2 bias) {
#if UNIT_SIGNED
    return packFloat2x16(fma(unpackFloat2x16((word & 0x00ff00ffu) ^ hidden(0x00800080u)), scale, bias));
#elif UNIT_BIAS
    return packFloat2x16(fma(unpackFloat2x16(word & 0x00ff00ffu), scale, bias));
#else
    return packFloat2x16(unpackFloat2x16(word & 0x00ff00ffu) * scale);
#endif
}

#if UNIT_HALVES
#define OF_HALF(pairs, i) (i < 2 ? pairs.xx : pairs.yy)
#else
#define OF_HALF(pairs, i) pairs.xx
#endif

void unit_f16_normal(UnitRaw unit, bool valid, out uvec4 words[4]) {
    uint q[8];
    vec2 scale, bias;
    unit_ints(unit, q, scale, bias);
    if (!valid) scale = bias = vec2(0.0);
    const f16vec2 scales = f16vec2(scale), biases = f16vec2(bias);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const f16vec2 s = OF_HALF(scales, i), b = OF_HALF(biases, i);
        const uint low = q[2 * i], high = q[2 * i + 1];
        words[i] = uvec4(scale_bytes(low, s, b), scale_bytes(low >> 8, s, b), scale_bytes(high, s, b), scale_bytes(high >> 8, s, b));
    }
}

void unit_f16_subnormal(UnitRaw unit, bool valid, out uvec4 words[4]) {
#ifdef UNIT_SUBNORMAL
    unit_subnormal(unit, valid, words);
#else
    uint q[8];
#ifdef UNIT_SCALE_F16
    unit_words(unit, q);
    const f16vec2 both = unit_scale_subnormal(unit);
    f16vec2 scales = both.xx, biases = both.yy;
#else
    vec2 scale, bias;
    unit_ints(unit, q, scale, bias);
    f16vec2 scales = f16vec2(scale * 262144.0), biases = f16vec2(bias * -0.015625);
#endif
#if UNIT_SIGNED  // 128 less, exactly: 128 * 2^-24 times the scale
    biases = fma(scales, f16vec2(-0.00000762939453125), biases);
#endif
    if (!valid) scales = biases = f16vec2(0.0);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const f16vec2 s = OF_HALF(scales, i), b = OF_HALF(biases, i);
        const uint low = q[2 * i], high = q[2 * i + 1];
        words[i] = uvec4(scale_subnormals(low, s, b), scale_subnormals(low >> 8, s, b), scale_subnormals(high, s, b),
                         scale_subnormals(high >> 8, s, b));
    }
#endif
}
#endif

#if defined(UNIT_FLIPPED_NIBBLES) || UNIT_INTS
void unit_f16(UnitRaw unit, bool valid, out uvec4 words[4]) {
    if (SUBNORMALS != 0) unit_f16_subnormal(unit, valid, words);
    else unit_f16_normal(unit, valid, words);
}
#else
void unit_f16(UnitRaw unit, bool valid, out uvec4 words[4]) {
    vec4 w[8];
    unit_decode(unit, w);
    if (!valid)
        [[unroll]] for (uint i = 0; i < 8; i++) w[i] = vec4(0.0);
    [[unroll]] for (uint i = 0; i < 4; i++) words[i] = uvec4(pack_four(w[2 * i]), pack_four(w[2 * i + 1]));
}
#endif

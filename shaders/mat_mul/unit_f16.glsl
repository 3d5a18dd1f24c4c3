// Decodes a unit of 32 weights to f16 in K order (mat_mul/matrix.glsl), eight to a 16-byte word.
// Needs quant/place.glsl, a QUANT_FILE and mat_mul/pack.glsl.
//
// The trick throughout: an f16 between 1024 and 2048 has a last bit worth 1. So an integer n < 1024 needs no conversion: (n | bits of 1024) is
// the f16 1024 + n, and subtracting 1024 is exact. Two weights are decoded per 32-bit instruction.

// 1024 twice as f16. xor with unknown_zero() hides the constant from the compiler:
// (word & MASK) | two_1024() is then one instruction on NVIDIA.
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

// valid: false gives zeros.
void unit_f16(UnitRaw unit, bool valid, out uvec4 words[4]) {
#ifdef UNIT_SCALE_F16
    f16vec2 both = unit_scale_f16(unit, two_1024());
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

// valid: false gives zeros.
void unit_f16(UnitRaw unit, bool valid, out uvec4 words[4]) {
    uint q[8];
    vec2 scale, bias;
    unit_ints(unit, q, scale, bias);
    if (!valid) scale = bias = vec2(0.0);
    const f16vec2 scales = f16vec2(scale), biases = f16vec2(bias);
    [[unroll]] for (uint i = 0; i < 4; i++) {
#if UNIT_HALVES
        const f16vec2 s = i < 2 ? scales.xx : scales.yy, b = i < 2 ? biases.xx : biases.yy;
#else
        const f16vec2 s = scales.xx, b = biases.xx;
#endif
        const uint low = q[2 * i], high = q[2 * i + 1];
        words[i] = uvec4(scale_bytes(low, s, b), scale_bytes(low >> 8, s, b), scale_bytes(high, s, b), scale_bytes(high >> 8, s, b));
    }
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

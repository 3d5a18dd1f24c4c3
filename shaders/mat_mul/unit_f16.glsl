// A unit of 32 weights as f16 in K order (mat_mul/matrix.glsl), eight a word. Needs quant/place.glsl, a QUANT_FILE and mat_mul/pack.glsl.

// 1024 as two f16.
uint two_1024() { return 0x64006400u ^ unknown_zero(); }

#ifdef UNIT_FLIPPED_NIBBLES
// Nibbles without a byte of their own: above 1024 an f16's last bit is worth 1, so a nibble in its low bits is 1 and in the next 16 times its value
// more. The differences are exact.
f16vec2 low_nibbles(uint word) {
    return unpackFloat2x16((word & 0x000f000fu) | two_1024()) - f16vec2(1024.0);
}

f16vec2 high_nibbles(uint word) {  // their top bits are flipped
    return fma(unpackFloat2x16((word & 0x00f000f0u) ^ (two_1024() ^ 0x00800080u)), f16vec2(0.0625), f16vec2(-64.0));
}

// there: false makes zeros of it.
void unit_f16(UnitRaw unit, bool there, out uvec4 words[4]) {
#ifdef UNIT_SCALE_F16
    f16vec2 both = unit_scale_f16(unit, two_1024());
    if (!there) both = f16vec2(0.0);
    const f16vec2 s = both.xx, b = -both.yy;
#else
    vec2 scale, bias;
    unit_scale(unit, scale, bias);
    if (!there) scale = bias = vec2(0.0);
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
// Bytes of a word as f16: above 1024 an f16's last bit is worth 1, so a byte put into the low bits of 1024 is 1024 more.
f16vec2 bytes_of(uint word) {
#if UNIT_SIGNED  // with its top bit flipped, a signed byte is 128 more
    return unpackFloat2x16((word & 0x00ff00ffu) ^ (two_1024() ^ 0x00800080u)) - f16vec2(1152.0);
#else
    return unpackFloat2x16((word & 0x00ff00ffu) | two_1024()) - f16vec2(1024.0);
#endif
}

uint scaled(uint word, f16vec2 scale, f16vec2 bias) {
#if UNIT_BIAS
    return packFloat2x16(fma(bytes_of(word), scale, -bias));
#else
    return packFloat2x16(bytes_of(word) * scale);
#endif
}

// there: false makes zeros of it.
void unit_f16(UnitRaw unit, bool there, out uvec4 words[4]) {
    uint q[8];
    vec2 scale, bias;
    unit_ints(unit, q, scale, bias);
    if (!there) scale = bias = vec2(0.0);
    const f16vec2 scales = f16vec2(scale), biases = f16vec2(bias);
    [[unroll]] for (uint i = 0; i < 4; i++) {
#if UNIT_HALVES
        const f16vec2 s = i < 2 ? scales.xx : scales.yy, b = i < 2 ? biases.xx : biases.yy;
#else
        const f16vec2 s = scales.xx, b = biases.xx;
#endif
        const uint low = q[2 * i], high = q[2 * i + 1];
        words[i] = uvec4(scaled(low, s, b), scaled(low >> 8, s, b), scaled(high, s, b), scaled(high >> 8, s, b));
    }
}
#else
void unit_f16(UnitRaw unit, bool there, out uvec4 words[4]) {
    vec4 w[8];
    unit_decode(unit, w);
    if (!there)
        [[unroll]] for (uint i = 0; i < 8; i++) w[i] = vec4(0.0);
    [[unroll]] for (uint i = 0; i < 4; i++) words[i] = uvec4(pack_four(w[2 * i]), pack_four(w[2 * i + 1]));
}
#endif

// Angles of RoPE and YaRN: cosine and sine for a pair of dimensions at a position.
//
//   vec2 rope_angle(uint pair, int pos)                   (cos, sin) of pos * frequency[pair], times ROPE_MSCALE
//   vec2 rope_angle(uint pair, int pos, float factor)     the same with the frequency divided by a frequency factor
//
// Angles are fixed-point: 64-bit fractions of a turn, of which pos * frequency keeps the upper 32 bits. Overflow is then a whole turn, so
// position 131072 is as exact as position 1 (an f32 product would be off by 0.008 radians there, a 32-bit frequency by 0.0001). Sine and cosine
// are polynomials over an eighth of a turn, since Vulkan guarantees only 2^-11 for its own.
//
// Defines:
//   ROPE_PAIRS        pairs that are rotated, n_dims / 2
//   ROPE_FREQUENCIES  their frequencies in turns per position, as 64-bit fractions uvec2(upper, lower), comma-separated:
//                     vkback.ops.rope.angles.fixed_point
//   ROPE_MSCALE       factor of both components (attention factor and YaRN's correction)

const uvec2 rope_frequencies[ROPE_PAIRS] = uvec2[](ROPE_FREQUENCIES);

vec2 rope_cos_sin(uint phase) {
    const uint quarter = (phase + 0x20000000u) >> 30;
    const float x = float(int(phase - (quarter << 30))) * 1.46291807926716e-9;    // 2 pi / 2^32
    const float xx = x * x;
    // Taylor series: at an eighth of a turn the first omitted terms are below 4e-9.
    const float s = x * (1.0 + xx * (-1.0 / 6.0 + xx * (1.0 / 120.0 + xx * (-1.0 / 5040.0 + xx * (1.0 / 362880.0)))));
    const float c = 1.0 + xx * (-0.5 + xx * (1.0 / 24.0 + xx * (-1.0 / 720.0 + xx * (1.0 / 40320.0 - xx * (1.0 / 3628800.0)))));
    const vec2 rotated = (quarter & 1u) == 0u ? vec2(c, s) : vec2(-s, c);
    return (quarter & 2u) == 0u ? rotated : -rotated;
}

uint rope_phase(uvec2 frequency, int pos) {
    uint upper, lower;
    umulExtended(uint(pos), frequency.y, upper, lower);
    // For a negative position, uint(pos) is 2^32 too large.
    return uint(pos) * frequency.x + upper - (pos < 0 ? frequency.y : 0u);
}

// frequency / factor. For pairs slower than one turn in 1024 positions, the ones that factors are made for, the 24 bits of a float are enough: 5e-5
// radians at position 131072. For faster pairs the quotient comes from a long division.
uvec2 rope_divide(uvec2 frequency, float factor) {
    if (factor == 1.0) return frequency;
    if (factor > 1e9) return uvec2(0u);    // some models freeze a pair in this way
    if (factor > 1.0 && frequency.x < 0x400000u) {
        const uint quotient = uint((float(frequency.x) * 1024.0 + float(frequency.y >> 22)) / factor + 0.5);
        return uvec2(quotient >> 10, quotient << 22);
    }
    // factor = divisor / 2^shift with a divisor of 24 bits. Long division in base 256:
    // the upper four digits of the frequency at once, then its lower four, then three zeros.
    const uint bits = floatBitsToUint(factor);
    const uint divisor = (bits & 0x7fffffu) | 0x800000u;
    const int shift = 150 - int(bits >> 23) - 24;
    uvec2 quotient = uvec2(0u, frequency.x / divisor);
    uint rest = frequency.x % divisor;
    for (int digit = 3; digit >= -3; digit--) {
        rest = (rest << 8) | (digit >= 0 ? (frequency.y >> (8 * digit)) & 0xffu : 0u);
        quotient = uvec2((quotient.x << 8) | (quotient.y >> 24), (quotient.y << 8) | (rest / divisor));
        rest %= divisor;
    }
    if (shift == 0) return quotient;
    if (shift > 0) return uvec2((quotient.x << shift) | (quotient.y >> (32 - shift)), quotient.y << shift);
    return uvec2(quotient.x >> -shift, (quotient.x << (32 + shift)) | (quotient.y >> -shift));
}

vec2 rope_angle(uint pair, int pos) {
    return ROPE_MSCALE * rope_cos_sin(rope_phase(rope_frequencies[pair], pos));
}

vec2 rope_angle(uint pair, int pos, float factor) {
    return ROPE_MSCALE * rope_cos_sin(rope_phase(rope_divide(rope_frequencies[pair], factor), pos));
}

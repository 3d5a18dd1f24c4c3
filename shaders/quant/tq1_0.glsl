// TQ1_0: 256 weights in 54 bytes.  weight = d * (digit - 1)
// Planes: qs in three parts of 16 per 256, qh 4 per 256, d f16 2 per 256.
//
// A byte / 256 is a fraction whose base-3 digits are the weights, first digit first. So byte * 3^n modulo 256 drops the first n digits, and
// one more multiplication by 3 makes digit n overflow into bits 8 and 9.
//   units 0..4: digit `unit` of parts 0 and 1
//   units 5, 6: digits 0 and 1 (unit 5), 2 and 3 (unit 6) of part 2, one for each half
//   unit 7:     digit 4 of part 2, then digits 0..3 of qh, four weights each
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uvec4 lo; uvec4 hi; uint d; uint index; };

UnitRaw unit_load(Place at) {
    const uint sub = unit_index(at, 8u) & 7u;
    UnitRaw r;
    r.lo = QUAD(sub < 5u ? 0u : 2u * p.w.part, at, 3);
    r.hi = sub < 5u ? QUAD(p.w.part, at, 3) : r.lo;
    if (sub == 7u) r.hi = uvec4(WORD(p.w.plane[0], at, 3));
    r.d = WORD(p.w.plane[1], at, 4);
    r.index = unit_index(at, 16u);
    return r;
}

uint power_of_3(uint n) {
    return n < 4u ? (0x1b090301u >> (8u * n)) & 0xffu : 81u;
}

// The digit that follows the first n, of each of four bytes; power = 3^n.
uint ternary_digits(uint word, uint power) {
    const uint even = ((word & 0x00ff00ffu) * power) & 0x00ff00ffu;
    const uint odd = (((word >> 8) & 0x00ff00ffu) * power) & 0x00ff00ffu;
    return ((even * 3u) >> 8 & 0x00030003u) | (odd * 3u & 0x03000300u);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint sub = r.index & 7u;
    const uint first = power_of_3(sub < 5u ? sub : 2u * sub - 10u);
    uvec4 second = uvec4(sub < 5u ? first : 3u * first);
    if (sub == 7u) second = uvec4(1u, 3u, 9u, 27u);
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = ternary_digits(r.lo[i], first);
        q[i + 4] = ternary_digits(r.hi[i], second[i]);
    }
    scale = vec2(half_of(r.d, r.index >> 3));
    bias = scale;
}
#include "quant/decode_ints.glsl"

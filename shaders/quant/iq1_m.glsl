// IQ1_M: 256 weights in 56 bytes.  weight = d * (1 + 2 scale) * (digit - 1 + delta), delta = 1/8 or -1/8
// Planes:
//   qs      4            bits 0..7 of the codebook index of each 8 weights
//   qh      2            a nibble per 8 weights: bits 8..10 of the index; bit 3 set: delta is negative
//   scales  8 per 256    four u16: bits 0..11 hold four 3-bit scales, one per 16 weights; the four top nibbles together are d, f16
//
// Delta may change within a half, so it goes into the integers: q = 4 digit + (delta > 0), and digit - 1 + delta = q / 4 - 9/8.
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/iq1.glsl"

struct UnitRaw { uint qs; uint qh; uvec2 scales; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(WORD(0u, at, 0), WORD(p.w.plane[0], at, 1), PAIR(p.w.plane[1], at, 3), unit_index(at, 8u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint qh = r.qh >> (16u * (r.index & 1u));
    [[unroll]] for (uint g = 0; g < 4; g++) {
        const uint nibble = qh >> (4 * g);
        const uint digits = look_up(byte_of(r.qs, g) | ((nibble << 8) & 0x700u));
        const uint positive = (nibble & 8u) == 0u ? 0x01010101u : 0u;
        q[2 * g] = ((digits << 2) & 0x0c0c0c0cu) | positive;
        q[2 * g + 1] = (digits & 0x0c0c0c0cu) | positive;
    }
    const uvec2 top = (r.scales >> 12) & 0x000f000fu;
    const uint d = (top.x & 15u) | (top.x >> 12) | (((top.y & 15u) | (top.y >> 12)) << 8);
    const uint s = (r.index & 4u) == 0u ? r.scales.x : r.scales.y;
    const uint own = s >> (16u * ((r.index >> 1) & 1u) + 6u * (r.index & 1u));
    scale = 0.25 * unpackHalf2x16(d).x * vec2(1u + 2u * (own & 7u), 1u + 2u * ((own >> 3) & 7u));
    bias = 4.5 * scale;
}
#include "quant/decode_ints.glsl"

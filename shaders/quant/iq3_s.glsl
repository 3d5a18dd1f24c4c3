// IQ3_S: 256 weights in 110 bytes.  weight = d * (1 + 2 scale) * magnitude * sign
// Planes:
//   qs      8            bits 0..7 of the codebook index of each 4 weights
//   signs   4            a bit per weight
//   qh      1            bit 8 of the indices
//   scales  4 per 256    a nibble per unit
//   d       2 per 256    f16
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "generated/iq3_s_codes.glsl"
#include "quant/signs.glsl"
#define ENTRY uint

// Magnitudes 1, 3 ... 15.
uint entry(uint codes) {
    return 0x01010101u + 2u * (codes & 0x07070707u);
}
#include "quant/codebook.glsl"

struct UnitRaw { uvec2 qs; uint signs; uint qh; uint scales; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 0), WORD(p.w.plane[1], at, 2), WORD(p.w.plane[2], at, 3),
                   WORD(p.w.plane[3], at, 4), unit_index(at, 16u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint high = byte_of(r.qh, r.index);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        const uint index = byte_of(r.qs[i >> 2], i) | ((high << (8 - i)) & 0x100u);
        q[i] = with_signs(look_up(index), (r.signs >> (4 * i)) & 15u);
    }
    const uint s = (r.scales >> (4u * (r.index & 7u))) & 15u;
    scale = vec2(half_of(r.d, r.index >> 3) * (1.0 + 2.0 * float(s)));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

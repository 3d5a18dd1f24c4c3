// IQ2_S: 256 weights in 82 bytes.  weight = d * (1/2 + scale) / 4 * magnitude * sign
// Planes:
//   qs    8              word 0: bits 0..7 of four codebook indices; word 1: four bytes of signs
//   head  2              byte 0: bits 8 and 9 of the indices; byte 1: a scale nibble per 16 weights
//   d     2 per 256      f16
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "generated/iq2_s_codes.glsl"
#include "quant/iq2.glsl"

struct UnitRaw { uvec2 qs; uint head; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 1), WORD(p.w.plane[1], at, 4), unit_index(at, 16u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint head = r.head >> (16u * (r.index & 1u));
    [[unroll]] for (uint g = 0; g < 4; g++) iq2_group(byte_of(r.qs.x, g) | ((head << (8 - 2 * g)) & 0x300u), byte_of(r.qs.y, g), g, q);
    scale = half_of(r.d, r.index >> 3) * (0.125 + 0.25 * vec2((head >> 8) & 15u, (head >> 12) & 15u));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

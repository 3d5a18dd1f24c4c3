// IQ2_XS: 256 weights in 74 bytes.  weight = d * (1/2 + scale) / 4 * magnitude * sign
// Planes:
//   qs      8            a u16 per 8 weights: codebook index (9 bits), sign code (7 bits)
//   scales  1            a nibble per 16 weights
//   d       2 per 256    f16
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "generated/iq2_xs_codes.glsl"
#include "quant/iq2.glsl"

struct UnitRaw { uvec2 qs; uint scales; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 2), WORD(p.w.plane[1], at, 4), unit_index(at, 16u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    // Sign codes of groups 0, 2, 1, 3 in bytes 0..3.
    const uint signs = even_signs(((r.qs.x >> 9) & 0x007f007fu) | ((r.qs.y >> 1) & 0x7f007f00u));
    [[unroll]] for (uint g = 0; g < 4; g++)
        iq2_group((r.qs[g >> 1] >> (16 * (g & 1))) & 511u, byte_of(signs, (g >> 1) | (g << 1)), g, q);
    const uint s = byte_of(r.scales, r.index);
    scale = half_of(r.d, r.index >> 3) * (0.125 + 0.25 * vec2(s & 15u, s >> 4));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

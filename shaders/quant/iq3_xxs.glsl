// IQ3_XXS: 256 weights in 98 bytes.  weight = d * (1/2 + scale) / 2 * magnitude * sign
// Planes:
//   qs     8             the codebook index of each 4 weights
//   signs  4             four sign codes of 7 bits, scale in the top 4 bits
//   d      2 per 256     f16
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "generated/iq3_xxs_codes.glsl"
#include "quant/signs.glsl"
#define ENTRY uint

// Magnitudes 4, 12, 20, 28, 36, 44, 52 and 62.
uint entry(uint codes) {
    const uint c = codes & 0x07070707u;
    return 0x04040404u + 8u * c + 2u * (c & (c >> 1) & (c >> 2) & 0x01010101u);
}
#include "quant/codebook.glsl"

struct UnitRaw { uvec2 qs; uint signs; uint d; uint block; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 0), WORD(p.w.plane[1], at, 4), unit_index(at, 16u) >> 3);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint signs = spread_signs(r.signs);
    [[unroll]] for (uint i = 0; i < 8; i++) q[i] = with_signs(look_up(byte_of(r.qs[i >> 2], i)), (signs >> (4 * i)) & 15u);
    scale = vec2(half_of(r.d, r.block) * (0.25 + 0.5 * float(r.signs >> 28)));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

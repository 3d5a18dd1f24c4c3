// IQ2_XXS: 256 weights in 66 bytes.  weight = d * (1/2 + scale) / 4 * magnitude * sign
// Planes:
//   qs  8                word 0: four codebook indices; word 1: four sign codes of 7 bits, scale in the top 4 bits
//   d   2 per 256        f16
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "generated/iq2_xxs_codes.glsl"
#include "quant/iq2.glsl"

struct UnitRaw { uvec2 qs; uint d; uint block; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 4), unit_index(at, 16u) >> 3);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint signs = spread_signs(r.qs.y);
    [[unroll]] for (uint g = 0; g < 4; g++) iq2_group(byte_of(r.qs.x, g), byte_of(signs, g), g, q);
    scale = vec2(half_of(r.d, r.block) * (0.125 + 0.25 * float(r.qs.y >> 28)));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

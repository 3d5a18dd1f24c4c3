// TQ2_0: 256 weights in 66 bytes. Planes: qs (2-bit) 8, d f16 2 per 256.  weight = d * (q - 1)
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec2 qs; uint d; uint block; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 4), unit_index(at, 16u) >> 3);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = two_bits(r.qs, i);
    scale = vec2(half_of(r.d, r.block));
    bias = scale;
}
#include "quant/decode_ints.glsl"

// Q1_0: 128 weights in 18 bytes. Planes: qs (1 bit) 4, d f16 2 per 128.  weight = d * (2 * bit - 1)
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uint qs; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(WORD(0u, at, 0), WORD(p.w.plane[0], at, 3), unit_index(at, 8u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = (r.qs >> i) & 0x01010101u;
    bias = vec2(half_of(r.d, r.index >> 2));
    scale = 2.0 * bias;
}
#include "quant/decode_ints.glsl"

// Q5_1: 32 weights in 24 bytes. Planes: qs (nibbles) 16, qh (fifth bits) 4, d and m f16 4.  weight = d * q + m
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uint qh; uint dm; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 0), WORD(p.w.plane[1], at, 0));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    split_nibbles(r.qs, q);
    add_fifth_bits(r.qh, q);
    const vec2 dm = unpackHalf2x16(r.dm);
    scale = dm.xx;
    bias = -dm.yy;
}
#include "quant/decode_ints.glsl"

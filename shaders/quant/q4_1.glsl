// Q4_1: 32 weights in 20 bytes. Planes: qs (nibbles, quant/nibbles_dot.glsl) 16, d and m f16 4.  weight = d * q + m
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uint dm; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 0));
}

#include "quant/nibbles_dot.glsl"
#if PATH_INT
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    const vec2 dm = unpackHalf2x16(r.dm);
    return dm.x * float(nibbles_dot_16(q, x, sum)) + dm.y * float(16 * (sum.x + sum.y));
}
#endif

void unit_scale(UnitRaw r, out vec2 scale, out vec2 bias) {
    const vec2 dm = unpackHalf2x16(r.dm);
    scale = dm.xx;
    bias = -dm.yy;
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    flipped_nibbles(r.qs, q);
    unit_scale(r, scale, bias);
}
#include "quant/decode_ints.glsl"

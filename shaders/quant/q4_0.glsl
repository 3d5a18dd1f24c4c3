// Q4_0: 32 weights in 18 bytes. Planes: qs (nibbles, quant/nibbles_dot.glsl) 16, d f16 2.  weight = d * (q - 8)
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 1), unit_index(at, 2u));
}

#include "quant/nibbles_dot.glsl"
#if PATH_INT
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    return half_of(r.d, r.index) * float(nibbles_dot_16(q, x, sum) - 128 * (sum.x + sum.y));
}
#endif

void unit_scale(UnitRaw r, out vec2 scale, out vec2 bias) {
    scale = vec2(half_of(r.d, r.index));
    bias = 8.0 * scale;
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    flipped_nibbles(r.qs, q);
    unit_scale(r, scale, bias);
}
#include "quant/decode_ints.glsl"

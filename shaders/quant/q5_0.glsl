// Q5_0: 32 weights in 22 bytes. Planes: qs (nibbles) 16, qh (fifth bits) 4, d f16 2.  weight = d * (q - 16)
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uint qh; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 0), WORD(p.w.plane[1], at, 1), unit_index(at, 2u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    split_nibbles(r.qs, q);
    add_fifth_bits(r.qh, q);
    scale = vec2(half_of(r.d, r.index));
    bias = 16.0 * scale;
}
#include "quant/decode_ints.glsl"

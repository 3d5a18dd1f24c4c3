// IQ4_NL: 32 weights in 18 bytes. Planes: qs (nibbles) 16, d f16 2.  weight = d * level[q]
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "quant/nibbles.glsl"
#include "quant/iq4_table.glsl"

struct UnitRaw { uvec4 qs; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 1), unit_number(at, 2u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    split_nibbles(r.qs, q);
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = iq4_levels(q[i]);
    scale = vec2(half_of(r.d, r.index));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

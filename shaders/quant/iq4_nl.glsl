// IQ4_NL: 32 weights in 18 bytes. Planes: qs 16 (bits of codes, quant/iq4_levels.glsl), d f16 2.  weight = d * level[q]
#define UNIT_INTS 1
#define UNIT_HALVES 0
#include "quant/iq4_levels.glsl"

struct UnitRaw { uvec4 qs; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 1), unit_index(at, 2u));
}

float unit_step(UnitRaw r) {
    return half_of(r.d, r.index);
}
#include "quant/iq4_decode.glsl"

// Q8_0: 32 weights in 34 bytes. Planes: qs int8 in two parts of 16, d f16 2.  weight = d * q
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1

struct UnitRaw { uvec4 lo; uvec4 hi; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), QUAD(p.w.part, at, 0), WORD(p.w.plane[0], at, 1), unit_index(at, 2u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = r.lo[i];
        q[i + 4] = r.hi[i];
    }
    scale = vec2(half_of(r.d, r.index));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

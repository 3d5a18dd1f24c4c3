// MXFP4: 32 weights in 17 bytes. Planes: qs (nibbles of E2M1) 16, e (E8M0 exponent) 1.
// weight = value * 2^(e - 128), value = 0 1 2 3 4 6 8 12 and their negatives (twice the E2M1 numbers).
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/e2m1.glsl"

struct UnitRaw { uvec4 qs; uint e; uint index; };

UnitRaw unit_load(uint row, uint unit) {
    const uint i = UNIT_AT(row, unit);
    return UnitRaw(w4[i], PLANE_WORD(0, row, unit, 2), LOW_BITS(row, unit));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    e2m1_plus_16(r.qs, q);
    const uint e = byte_of(r.e, r.index);
    scale = vec2(uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23));
    bias = 16.0 * scale;
}
#include "quant/decode_ints.glsl"

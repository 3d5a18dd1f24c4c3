// Q2_K: 256 weights in 84 bytes. Planes: qs (2-bit) 8, scales 2 (low nibble scale, high nibble min; one byte per 16), d and dmin f16 4 per 256.
// weight = d * scale * q - dmin * min
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec2 qs; uint scales; uint dm; uint index; };

UnitRaw unit_load(uint row, uint unit) {
    const uint i = row * p.w.units + unit;
    return UnitRaw(w2[i], PLANE_HALF_WORD(0, i), w1[p.w.plane[1] * 4u + (i >> 3)], i);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = two_bits(r.qs, i, 0);
    const uint s = r.scales >> (16u * (r.index & 1u));
    const vec2 dm = unpackHalf2x16(r.dm);
    scale = dm.x * vec2(s & 15u, (s >> 8) & 15u);
    bias = dm.y * vec2((s >> 4) & 15u, (s >> 12) & 15u);
}
#include "quant/decode_ints.glsl"

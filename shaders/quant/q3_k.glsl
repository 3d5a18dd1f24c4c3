// Q3_K: 256 weights in 110 bytes. Planes: qs (2-bit) 8, qh (third bit) 4, scales 12 per 256 (16 of 6 bits), d f16 2 per 256.
// weight = d * (scale - 32) * (q - 4)
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec2 qs; uint qh; uint scale_lo; uint scale_hi; uint d; uint index; };

UnitRaw unit_load(uint row, uint unit) {
    const uint i = row * p.w.units + unit;
    const uint block = i >> 3;
    const uint scales = p.w.plane[1] * 4u + block * 3u;
    return UnitRaw(w2[i], w1[p.w.plane[0] * 4u + i], w1[scales + ((i >> 2) & 1u)], w1[scales + 2u], PLANE_HALF_WORD(2, block), i);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = two_bits(r.qs, i, 0);
    add_bits(r.qh, 4u, q);
    const uint lo = byte_of(r.scale_lo, r.index);
    const uint hi = r.scale_hi >> (4u * (r.index & 7u));
    const ivec2 s = ivec2((lo & 15u) | ((hi & 3u) << 4), (lo >> 4) | ((hi & 12u) << 2)) - 32;
    scale = half_of(r.d, r.index >> 3) * vec2(s);
    bias = 4.0 * scale;
}
#include "quant/decode_ints.glsl"

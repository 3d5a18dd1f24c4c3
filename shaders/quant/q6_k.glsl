// Q6_K: 256 weights in 210 bytes. Planes: qs (low nibbles) 16, qh (2-bit) 8, scales int8 2 (one per 16), d f16 2 per 256.
// weight = d * scale * (q - 32)
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uvec2 qh; uint scales; uint d; uint index; };

UnitRaw unit_load(uint row, uint unit) {
    const uint i = UNIT_AT(row, unit);
    return UnitRaw(w4[i], w2[p.w.plane[0] * 2u + i], PLANE_WORD(1, row, unit, 1), PLANE_WORD(2, row, unit, 4), UNIT_AT(row, unit));
}

void unit_words(UnitRaw r, out uint q[8]) {
    split_nibbles(r.qs, q);
    [[unroll]] for (int i = 0; i < 8; i++) q[i] |= two_bits(r.qh, i, 4);
}

ivec2 unit_scales(UnitRaw r) {
    const int s = int(r.scales >> (16u * (r.index & 1u)));
    return ivec2((s << 24) >> 24, (s << 16) >> 24);
}

#if PATH_INT
#define UNIT_DOT 1.0
#define UNIT_WORDS 8
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = unit_scales(r) * halves_dot(q, x, -32 * sum);
    return half_of(r.d, r.index >> 3) * float(halves.x + halves.y);
}
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    unit_words(r, q);
    scale = half_of(r.d, r.index >> 3) * vec2(unit_scales(r));
    bias = 32.0 * scale;
}
#include "quant/decode_ints.glsl"

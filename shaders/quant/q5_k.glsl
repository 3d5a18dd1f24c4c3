// Q5_K: 256 weights in 176 bytes. Planes: qs (nibbles) 16, qh (fifth bits) 4, head 16 per 256.  weight = d * scale * q - dmin * min
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uint qh; uvec4 head; uint sub; };
#include "quant/k_head.glsl"

UnitRaw unit_load(uint row, uint unit) {
    const uint i = UNIT_AT(row, unit);
    return UnitRaw(w4[i], PLANE_WORD(0, row, unit, 0), w4[p.w.plane[1] + ITEM_AT(row, unit, 3)], unit & 7u);
}

void unit_words(UnitRaw r, out uint q[8]) {
    split_nibbles(r.qs, q);
    add_bits(r.qh, 16u, q);
}

#if PATH_INT
#define UNIT_DOT 1.0
#define UNIT_WORDS 8
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = halves_dot(q, x, ivec2(0));
    return k_product(r.head, r.sub, halves.x + halves.y, sum.x + sum.y);
}
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    unit_words(r, q);
    k_head(r.head, r.sub, scale, bias);
}
#include "quant/decode_ints.glsl"

// Q5_K: 256 weights in 176 bytes. Planes: qs (words 0 to 3 of five) 16, qh (word 4) 4, head 16 per 256 (quant/k_head.glsl).
// weight = d * scale * q - dmin * min
//
// Byte b of word w holds value 4w + b at bits 0..4. Values 20 + b, 24 + b and 28 + b have no byte of their own. Their bits 0..2 are bits 5..7
// of words 0, 2 and 4. Bits 3, 4 of 20 + b are bits 5, 6 of word 1; those of 24 + b are bits 5, 6 of word 3;
// those of 28 + b are bit 7 of words 1 and 3.
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uvec4 qs; uint qh; uvec4 head; uint sub, odd; };
#define UNIT_HEADS 1
#include "quant/k_head.glsl"

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 0), QUAD(p.w.plane[1], at, 3), unit_index(at, 8u) & 7u, 0u);
}

void unit_words(UnitRaw r, out uint q[8]) {
    const uint word[5] = {r.qs.x, r.qs.y, r.qs.z, r.qs.w, r.qh};
    [[unroll]] for (int i = 0; i < 5; i++) q[i] = word[i] & 0x1f1f1f1fu;
    q[5] = ((word[0] >> 5) & 0x07070707u) | ((word[1] >> 2) & 0x18181818u);
    q[6] = ((word[2] >> 5) & 0x07070707u) | ((word[3] >> 2) & 0x18181818u);
    q[7] = ((word[4] >> 5) & 0x07070707u) | ((word[1] >> 4) & 0x08080808u) | ((word[3] >> 3) & 0x10101010u);
}

#ifdef UNIT_SCALE_F16
f16vec2 unit_scale_subnormal(UnitRaw r) { return k_head_subnormal(r.head, r.sub, r.odd); }
#endif

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
    k_head(r.head, r.sub, r.odd, scale, bias);
}
#include "quant/decode_ints.glsl"

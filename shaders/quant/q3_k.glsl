// Q3_K: 256 weights in 110 bytes.  weight = d * (scale - 32) * (q - 4)
// Planes: qs (words 0 and 1 of three) 8, qh (word 2) 4, scales 12 per 256 (16 of 6 bits), d f16 2 per 256.
//
// Byte b of word w holds value 4w + b at bits 0..2 and value 16 + 4w + b at bits 3..5; the latter is left there, eight times too large. The
// last four values of each half have no byte of their own: 12 + b is in bits 6, 7 of word 0 and bit 6 of word 1;
// 28 + b in bits 6, 7 of word 2 and bit 7 of word 1.
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uvec2 qs; uint qh; uint scale_lo; uint scale_hi; uint d; uint index; };

UnitRaw unit_load(Place at) {
    const uint scales = p.w.plane[1] * 4u, number = unit_index(at, 16u);
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 0), w1[item_at(scales + ((number >> 2) & 1u), at, 3u, 3u, MAX_WORD_INDEX)],
                   w1[item_at(scales + 2u, at, 3u, 3u, MAX_WORD_INDEX)], WORD(p.w.plane[2], at, 4), number);
}

void unit_words(UnitRaw r, out uint q[8]) {
    const uint word[3] = {r.qs.x, r.qs.y, r.qh};
    [[unroll]] for (int i = 0; i < 3; i++) {
        q[i] = word[i] & 0x07070707u;
        q[i + 4] = word[i] & 0x38383838u;
    }
    q[3] = ((word[0] >> 6) & 0x03030303u) | ((word[1] >> 4) & 0x04040404u);
    q[7] = ((word[2] >> 3) & 0x18181818u) | ((word[1] >> 2) & 0x20202020u);
}

// Scales of the two halves, minus 32. The first is multiplied by 8, to match the second half's values.
ivec2 unit_scales(UnitRaw r) {
    const uint lo = r.scale_lo >> (8u * (r.index & 3u));
    const uint hi = r.scale_hi >> (4u * (r.index & 7u));
    return ivec2(((lo << 3) & 0x78u) | ((hi << 7) & 0x180u), ((lo >> 4) & 0xfu) | ((hi << 2) & 0x30u)) - ivec2(256, 32);
}

#if PATH_INT
#define UNIT_DOT 0.125
#define UNIT_WORDS 8
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = unit_scales(r) * halves_dot(q, x, ivec2(-4, -32) * sum);
    return half_of(r.d, r.index >> 3) * float(halves.x + halves.y);
}
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    unit_words(r, q);
    scale = half_of(r.d, r.index >> 3) * (vec2(0.125, 1.0) * vec2(unit_scales(r)));
    bias = 4.0 * scale;
    scale.y *= 0.125;
}
#include "quant/decode_ints.glsl"

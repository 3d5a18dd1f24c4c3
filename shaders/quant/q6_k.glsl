// Q6_K: 256 weights in 210 bytes.  weight = d * scale * (q - 32)
// Planes: qs (words 0 to 3 of six) 16, qh (words 4 and 5) 8, scales int8 2 (one per 16 weights), d f16 2 per 256.
//
// Each half (16 weights) has three words. Byte b of word w holds value 4w + b at bits 0..5;
// bits 6 and 7 hold bits 2w and 2w + 1 of value 12 + b.
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uvec4 qs; uvec2 qh; uint scales; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), PAIR(p.w.plane[0], at, 0), WORD(p.w.plane[1], at, 1), WORD(p.w.plane[2], at, 4), unit_index(at, 16u));
}

void unit_words(UnitRaw r, out uint q[8]) {
    const uint word[6] = {r.qs.x, r.qs.y, r.qs.z, r.qs.w, r.qh.x, r.qh.y};
    [[unroll]] for (int h = 0; h < 2; h++) {
        [[unroll]] for (int i = 0; i < 3; i++) q[4 * h + i] = word[3 * h + i] & 0x3f3f3f3fu;
        q[4 * h + 3] = ((word[3 * h] >> 6) & 0x03030303u) | ((word[3 * h + 1] >> 4) & 0x0c0c0c0cu) | ((word[3 * h + 2] >> 2) & 0x30303030u);
    }
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

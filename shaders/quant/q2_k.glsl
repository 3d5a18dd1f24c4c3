// Q2_K: 256 weights in 84 bytes.  weight = d * scale * q - dmin * min
// Planes: qs (2-bit) 8, scales 2 (a byte per 16 weights: low nibble scale, high nibble min), d and dmin f16 4 per 256.
//
// Byte b of word w of qs holds values 8w + b, 16 + 8w + b, 8w + 4 + b and 16 + 8w + 4 + b at bits 0, 2, 4 and 6. One shift by 4 thus serves
// four words of int8. Values of the unit's second half are left where they are masked, four times too large; their scale makes up for it.
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0

struct UnitRaw { uvec2 qs; uint scales; uint dm; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(PAIR(0u, at, 0), WORD(p.w.plane[0], at, 1), WORD(p.w.plane[1], at, 3), unit_index(at, 2u));
}

void unit_words(UnitRaw r, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        const uint pairs = r.qs[i >> 1] >> (4 * (i & 1));
        q[i] = pairs & 0x03030303u;
        q[i + 4] = pairs & 0x0c0c0c0cu;
    }
}

#if PATH_INT
#define UNIT_DOT (1.0 / 1024.0)
#define UNIT_WORDS 8
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = halves_dot(q, x, ivec2(0));
    const uint s = r.scales >> (16u * (r.index & 1u));
    // Scales and mins are masked in place, too. The first scale is scaled up by 4 * 256 to match the second, so the products are 1024
    // times too large (UNIT_DOT) and the mins 4096 times. All magnitudes stay below 2^28.
    const int scaled = int(s & 0xfu) * (1024 * halves.x) + int(s & 0xf00u) * halves.y;
    const int low = int(s & 0xf0u) * (256 * sum.x) + int(s & 0xf000u) * sum.y;
    const vec2 dm = unpackHalf2x16(r.dm);
    return dm.x * float(scaled) - 0.25 * dm.y * float(low);
}
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    unit_words(r, q);
    const uint s = r.scales >> (16u * (r.index & 1u));
    const vec2 dm = unpackHalf2x16(r.dm);
    scale = dm.x * vec2(s & 15u, 0.25 * float((s >> 8) & 15u));
    bias = dm.y * vec2((s >> 4) & 15u, (s >> 12) & 15u);
}
#include "quant/decode_ints.glsl"

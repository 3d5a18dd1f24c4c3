// IQ4_XS: 256 weights in 136 bytes.  weight = d * (scale - 32) * level[q]
// Planes: qs 16 (bits of codes, quant/iq4_levels.glsl), head 8 per 256 (word 0: d f16, then the scales' high bits, two each;
// word 1: their low nibbles).
#define UNIT_INTS 1
#define UNIT_HALVES 0
#include "quant/iq4_levels.glsl"

struct UnitRaw { uvec4 qs; uvec2 head; uint sub; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), PAIR(p.w.plane[0], at, 3), unit_index(at, 8u) & 7u);
}

float unit_step(UnitRaw r) {
    const uint lo = (r.head.y >> (4u * r.sub)) & 15u;
    const uint hi = (r.head.x >> (16u + 2u * r.sub)) & 3u;
    return unpackHalf2x16(r.head.x).x * float(int(lo | (hi << 4)) - 32);
}
#include "quant/iq4_decode.glsl"

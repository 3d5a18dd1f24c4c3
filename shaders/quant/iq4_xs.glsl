// IQ4_XS: 256 weights in 136 bytes. Planes: qs (nibbles) 16, head 8 per 256 (d f16, high scale bits 16; low scale nibbles 32).
// weight = d * (scale - 32) * level[q]
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#include "quant/nibbles.glsl"
#include "quant/iq4_table.glsl"

struct UnitRaw { uvec4 qs; uvec2 head; uint sub; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), PAIR(p.w.plane[0], at, 3), unit_number(at, 8u) & 7u);
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    split_nibbles(r.qs, q);
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = iq4_levels(q[i]);
    const uint lo = (r.head.y >> (4u * r.sub)) & 15u;
    const uint hi = (r.head.x >> (16u + 2u * r.sub)) & 3u;
    scale = vec2(unpackHalf2x16(r.head.x).x * float(int(lo | (hi << 4)) - 32));
    bias = vec2(0.0);
}
#include "quant/decode_ints.glsl"

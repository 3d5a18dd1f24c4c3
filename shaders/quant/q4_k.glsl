// Q4_K: 256 weights in 144 bytes. Planes: qs (nibbles, quant/nibbles_dot.glsl) 16, head 16 per 256 (quant/k_head.glsl).
// weight = d * scale * q - dmin * min
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/nibbles.glsl"

struct UnitRaw { uvec4 qs; uvec4 head; uint sub, odd; };
#define UNIT_HEADS 1
#include "quant/k_head.glsl"

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), QUAD(p.w.plane[0], at, 3), unit_index(at, 8u) & 7u, 0u);
}

#include "quant/nibbles_dot.glsl"
#if PATH_INT
float unit_dot(UnitRaw r, uint q[8], uint x[8], ivec2 sum) {
    return k_product(r.head, r.sub, nibbles_dot_16(q, x, sum), 16 * (sum.x + sum.y));
}
#endif

void unit_scale(UnitRaw r, out vec2 scale, out vec2 bias) {
    k_head(r.head, r.sub, r.odd, scale, bias);
}

#ifdef UNIT_SCALE_F16
f16vec2 unit_scale_f16(UnitRaw r) { return k_head_f16(r.head, r.sub, r.odd); }
f16vec2 unit_scale_subnormal(UnitRaw r) { return k_head_subnormal(r.head, r.sub, r.odd); }
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    flipped_nibbles(r.qs, q);
    unit_scale(r, scale, bias);
}
#include "quant/decode_ints.glsl"

// Block head of Q4_K and Q5_K, 16 bytes per 256 weights: d, dmin and eight 6-bit scales and mins (bit order in docs/architecture.md).
// sub: number of the unit in its block, 0..7. UNIT_HEADS tells kernels that UnitRaw has `head` and `sub`, so that they may load one head for
// several units.
//
// k_low_bits   bits 0..3: low four bits of the scale; bits 4..7: of the min; the bits above belong to other units
// k_high_bits  bits 0..1: high two bits of the scale; bits 2..3: of the min; likewise
uint k_low_bits(uvec4 head, uint sub) { return ((sub & 4u) == 0u ? head.y : head.z) >> (8u * (sub & 3u)); }
uint k_high_bits(uvec4 head, uint sub) { return head.w >> (4u * sub); }

ivec2 k_scale_min(uvec4 head, uint sub) {
    const uint lo = k_low_bits(head, sub), hi = k_high_bits(head, sub);
    return ivec2((lo & 0xfu) | ((hi << 4) & 0x30u), ((lo >> 4) & 0xfu) | ((hi << 2) & 0x30u));
}

void k_head(uvec4 head, uint sub, out vec2 scale, out vec2 bias) {
    const vec2 both = unpackHalf2x16(head.x) * vec2(k_scale_min(head, sub));
    scale = both.xx;
    bias = both.yy;
}

#ifdef DECODES_F16
// Scale and min as f16, converted without a conversion: one_k holds 1024 twice as f16, whose last bit is worth 1. So (n | one_k) is 1024 + n as
// f16 for n < 1024, and subtracting 1024 leaves n.
#define UNIT_SCALE_F16
uint k_both(uvec4 head, uint sub) {
    const uint lo = k_low_bits(head, sub), hi = k_high_bits(head, sub);
    return (lo & 0xfu) | ((lo << 12) & 0xf0000u) | ((hi << 4) & 0x30u) | ((hi << 18) & 0x300000u);
}

f16vec2 k_head_f16(uvec4 head, uint sub, uint one_k) {
    return (unpackFloat2x16(k_both(head, sub) | one_k) - f16vec2(1024.0)) * unpackFloat2x16(head.x);
}

// The scale times 2^18 and the min times -2^-6, as mat_mul/unit_f16.glsl wants them of subnormals: integers times 32 and -2^-19, d and dmin times
// 2^13. All but the last product is exact.
f16vec2 k_head_subnormal(uvec4 head, uint sub, uint one_k) {
    const f16vec2 ints = fma(unpackFloat2x16(k_both(head, sub) | one_k), f16vec2(32.0, -0.0000019073486328125), f16vec2(-32768.0, 0.001953125));
    return ints * (unpackFloat2x16(head.x) * f16vec2(8192.0));
}
#endif

// A unit's dot product: d * scale * all - dmin * min * sum, where all = sum of q * x and sum = sum of x.
float k_product(uvec4 head, uint sub, int all, int sum) {
    const ivec2 both = k_scale_min(head, sub);
    const vec2 dm = unpackHalf2x16(head.x);
    return dm.x * float(both.x * all) - dm.y * float(both.y * sum);
}

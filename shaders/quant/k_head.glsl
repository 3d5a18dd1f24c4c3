// Of Q4_K and Q5_K: the head of a block in 16 bytes, d, dmin and eight 6-bit scales and mins (bit order in docs/architecture.md). sub: number of
// the unit in its block. Its lowest bits are, of the low bits, four of the scale and four of the min; of the high ones two and two.
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

#ifdef MAKES_F16
// Scale and minimum as f16; one_k: 1024 as two f16, above which an f16's last bit is worth 1.
#define UNIT_SCALE_F16
f16vec2 k_head_f16(uvec4 head, uint sub, uint one_k) {
    const uint lo = k_low_bits(head, sub), hi = k_high_bits(head, sub);
    const uint both = (lo & 0xfu) | ((lo << 12) & 0xf0000u) | ((hi << 4) & 0x30u) | ((hi << 18) & 0x300000u);
    return (unpackFloat2x16(both | one_k) - f16vec2(1024.0)) * unpackFloat2x16(head.x);
}
#endif

// d * scale * all - dmin * min * sum
float k_product(uvec4 head, uint sub, int all, int sum) {
    const ivec2 both = k_scale_min(head, sub);
    const vec2 dm = unpackHalf2x16(head.x);
    return dm.x * float(both.x * all) - dm.y * float(both.y * sum);
}

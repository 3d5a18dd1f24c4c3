// Of Q4_K and Q5_K: the head of a block in 16 bytes, d, dmin and eight 6-bit scales and mins (bit order in docs/architecture.md). sub: number of
// the unit in its block.
ivec2 k_scale_min(uvec4 head, uint sub) {
    const uint lo = ((sub & 4u) == 0u ? head.y : head.z) >> (8u * (sub & 3u));
    const uint hi = head.w >> (4u * sub);
    return ivec2((lo & 0xfu) | ((hi << 4) & 0x30u), ((lo >> 4) & 0xfu) | ((hi << 2) & 0x30u));
}

void k_head(uvec4 head, uint sub, out vec2 scale, out vec2 bias) {
    const vec2 both = unpackHalf2x16(head.x) * vec2(k_scale_min(head, sub));
    scale = both.xx;
    bias = both.yy;
}

// d * scale * all - dmin * min * sum
float k_product(uvec4 head, uint sub, int all, int sum) {
    const ivec2 both = k_scale_min(head, sub);
    const vec2 dm = unpackHalf2x16(head.x);
    return dm.x * float(both.x * all) - dm.y * float(both.y * sum);
}

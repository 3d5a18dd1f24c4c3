// Block head of Q4_K and Q5_K, 16 bytes per 256 weights: d, dmin and eight 6-bit scales and mins (bit order in docs/weight_layout.md).
// sub: number of the unit in its block, 0..7. UNIT_HEADS tells kernels that UnitRaw has `head`, `sub` and `odd`, so that they may load one head
// for two units: the number of the second is sub + odd, where odd is the constant 1 and sub is even. Everywhere else odd is 0.
//
// k_low_bits   bits 0..3: low four bits of the scale; bits 16..19: of the min; the others belong to other units
// k_high_bits  bits 0..1: high two bits of the scale; bits 16..17: of the min; likewise
uint k_low_bits(uvec4 head, uint sub) { return ((sub & 4u) == 0u ? head.y : head.z) >> (4u * (sub & 3u)); }
uint k_high_bits(uvec4 head, uint sub) { return head.w >> (2u * sub); }

// The scale in the lower half of a word, the min in the upper half, and the other bits of `base`.
uint k_scale_min(uvec4 head, uint sub, uint odd, uint base) {
    const uint lo = k_low_bits(head, sub), hi = k_high_bits(head, sub);
    return ((odd != 0u ? lo >> 4 : lo) & 0x000f000fu) | base | ((odd != 0u ? hi << 2 : hi << 4) & 0x00300030u);
}

ivec2 k_scale_min(uvec4 head, uint sub, uint odd) {
    const uint both = k_scale_min(head, sub, odd, 0u);
    return ivec2(both & 0xffffu, both >> 16);
}

void k_head(uvec4 head, uint sub, uint odd, out vec2 scale, out vec2 bias) {
    const vec2 both = unpackHalf2x16(head.x) * vec2(k_scale_min(head, sub, odd));
    scale = both.xx;
    bias = both.yy;
}

#ifdef DECODES_F16
// Scale and min as f16, converted without a conversion: the last bit of an f16 is worth as much as that of any other f16 with the same exponent.
// So with the bits of a power of two around it an integer is added to that power, as a multiple of its last bit, and subtracting the power
// leaves the multiple.
#define UNIT_SCALE_F16
f16vec2 k_multiples(uvec4 head, uint sub, uint odd, uint powers) {
    return unpackFloat2x16(k_scale_min(head, sub, odd, powers)) - unpackFloat2x16(powers);
}

// As they are: the last bit of 1024 is worth 1.
f16vec2 k_head_f16(uvec4 head, uint sub, uint odd) {
    return k_multiples(head, sub, odd, hidden(0x64006400u)) * unpackFloat2x16(head.x);
}

// The scale times 2^18 and the min times -2^-6, as gemm/unit_f16.glsl wants them of subnormals. The last bit of 32768 is worth 32, that of
// -2^-9 is worth -2^-19; the rest is done to d and dmin. All but the last product is exact.
f16vec2 k_head_subnormal(uvec4 head, uint sub, uint odd) {
    return k_multiples(head, sub, odd, hidden(0x98007800u)) * (unpackFloat2x16(head.x) * f16vec2(8192.0));
}
#endif

// A unit's dot product: d * scale * all - dmin * min * sum, where all = sum of q * x and sum = sum of x.
float k_product(uvec4 head, uint sub, int all, int sum) {
    const ivec2 both = k_scale_min(head, sub, 0u);
    const vec2 dm = unpackHalf2x16(head.x);
    return dm.x * float(both.x * all) - dm.y * float(both.y * sum);
}

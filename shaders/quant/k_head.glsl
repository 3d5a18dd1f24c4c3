// The 16-byte head of a Q4_K or Q5_K block: d, dmin, and eight 6-bit scales and mins (bit order in docs/architecture.md).
void k_head(uvec4 head, uint sub, out vec2 scale, out vec2 bias) {
    const uint lo = byte_of((sub & 4u) == 0u ? head.y : head.z, sub);
    const uint hi = head.w >> (4u * sub);
    const vec2 dm = unpackHalf2x16(head.x);
    scale = vec2(dm.x * float((lo & 15u) | ((hi & 3u) << 4)));
    bias = vec2(dm.y * float((lo >> 4) | ((hi & 12u) << 2)));
}

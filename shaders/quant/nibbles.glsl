// 16 bytes of nibbles: byte j holds value j low and value j + 16 high.
void split_nibbles(uvec4 qs, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = qs[i] & 0x0f0f0f0fu;
        q[i + 4] = (qs[i] >> 4) & 0x0f0f0f0fu;
    }
}

// The same for the integer path: high nibbles stay where they are, as signed bytes of 16 * (value - 8).
void split_nibbles_16(uvec4 qs, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = qs[i] & 0x0f0f0f0fu;
        q[i + 4] = (qs[i] & 0xf0f0f0f0u) ^ 0x80808080u;
    }
}

// 4 bytes of single bits, value 4i + b at bit 8b + i, added as `weight` (16: fifth bit, 4: third bit).
void add_bits(uint bits, uint weight, inout uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] |= ((bits >> i) & 0x01010101u) * weight;
}

#if PATH_INT
// 16 times the sum of nibble * x, of what split_nibbles_16 has made. sum: of the x of each half.
int nibbles_dot_16(uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = halves_dot(q, x, ivec2(0, 128 * sum.y));
    return 16 * halves.x + halves.y;
}
#endif

// 8 bytes of two-bit numbers, value 16h + 4i + b at bits 8b + 2i of word h, shifted left by `shift`.
uint two_bits(uvec2 words, int i, int shift) {
    return ((words[i >> 2] >> (2 * (i & 3))) & 0x03030303u) << shift;
}

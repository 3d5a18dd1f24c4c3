// 16 bytes of nibbles: byte j holds value j low and value j + 16 high.
void split_nibbles(uvec4 qs, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = qs[i] & 0x0f0f0f0fu;
        q[i + 4] = (qs[i] >> 4) & 0x0f0f0f0fu;
    }
}

// 4 bytes of single bits, value 4i + b at bit 8b + i, added as `weight` (16: fifth bit, 4: third bit).
void add_bits(uint bits, uint weight, inout uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] |= ((bits >> i) & 0x01010101u) * weight;
}

// 8 bytes of two-bit numbers, value 16h + 4i + b at bits 8b + 2i of word h, shifted left by `shift`.
uint two_bits(uvec2 words, int i, int shift) {
    return ((words[i >> 2] >> (2 * (i & 3))) & 0x03030303u) << shift;
}

// 16 bytes of nibbles: byte j holds value j low and value j + 16 high.
void split_nibbles(uvec4 qs, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = qs[i] & 0x0f0f0f0fu;
        q[i + 4] = (qs[i] >> 4) & 0x0f0f0f0fu;
    }
}

// 4 bytes of single bits, value 4i + b at bit 8b + i, as fifth bits.
void add_fifth_bits(uint bits, inout uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] |= (i < 4 ? bits << (4 - i) : bits >> (i - 4)) & 0x10101010u;
}

// 8 bytes of two-bit numbers, value 16h + 4i + b at bits 8b + 2i of word h.
uint two_bits(uvec2 words, int i) {
    return (words[i >> 2] >> (2 * (i & 3))) & 0x03030303u;
}

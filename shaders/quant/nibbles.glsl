// Splits 16 bytes of nibbles: byte j holds value j in its low nibble and value j + 16 in its high one.
void split_nibbles(uvec4 qs, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = qs[i] & 0x0f0f0f0fu;
        q[i + 4] = (qs[i] >> 4) & 0x0f0f0f0fu;
    }
}

// Adds the fifth bits: of 4 bytes of single bits, bit 8b + i belongs to value 4i + b.
void add_fifth_bits(uint bits, inout uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] |= (i < 4 ? bits << (4 - i) : bits >> (i - 4)) & 0x10101010u;
}

// Values 16h + 4i .. 16h + 4i + 3 as bytes, from 8 bytes of two-bit numbers: value 16h + 4i + b is at bits 8b + 2i of word h.
uint two_bits(uvec2 words, int i) {
    return (words[i >> 2] >> (2 * (i & 3))) & 0x03030303u;
}

// Of Q4_0, Q4_1 and Q4_K, whose UnitRaw has `qs` (quant/nibbles.glsl), the top bit of every high nibble flipped: what they have in common.
#define UNIT_FLIPPED_NIBBLES 1
void flipped_nibbles(uvec4 qs, out uint q[8]) {
    split_nibbles(qs ^ 0x80808080u, q);
}

#if PATH_INT
#define UNIT_DOT 0.0625
#define UNIT_WORDS 8
// Low nibbles, and high ones where they are, as signed bytes of 16 * (value - 8).
void unit_words(UnitRaw r, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = r.qs[i] & 0x0f0f0f0fu;
        q[i + 4] = r.qs[i] & 0xf0f0f0f0u;
    }
}

// 16 times the sum of nibble * x. sum: of the x of each half.
int nibbles_dot_16(uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = halves_dot(q, x, ivec2(0, 128 * sum.y));
    return 16 * halves.x + halves.y;
}
#endif

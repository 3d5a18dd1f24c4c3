// What Q4_0, Q4_1 and Q4_K share. Their UnitRaw has `qs`, nibbles in which the top bit of every high nibble was flipped at load. The high
// nibbles, masked in place, are then signed bytes: 16 * (value - 8). No shift is needed.
#define UNIT_FLIPPED_NIBBLES 1
void flipped_nibbles(uvec4 qs, out uint q[8]) {
    split_nibbles(qs ^ 0x80808080u, q);
}

#if PATH_INT
#define UNIT_DOT 0.0625
#define UNIT_WORDS 8
// q[0..3]: the low nibbles. q[4..7]: the high ones in place, signed bytes 16 * (value - 8).
void unit_words(UnitRaw r, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        q[i] = r.qs[i] & 0x0f0f0f0fu;
        q[i + 4] = r.qs[i] & 0xf0f0f0f0u;
    }
}

// 16 * (sum of value * x). sum: sums of the two halves of x; 128 * sum.y puts the 8 back that the flipped bit took from the high nibbles.
int nibbles_dot_16(uint q[8], uint x[8], ivec2 sum) {
    const ivec2 halves = halves_dot(q, x, ivec2(0, 128 * sum.y));
    return 16 * halves.x + halves.y;
}
#endif

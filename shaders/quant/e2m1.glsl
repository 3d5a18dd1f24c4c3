// Nibbles of MXFP4 and NVFP4 (E2M1 codes), decoded eight at a time by bitwise steps.
// At load the codes were renamed (E2M1_ORDER in vkback/quants/mx.py) so that
//   level = 3 * small + large - 12
// is twice the E2M1 value (0 1 2 3 4 6 8 12 and their negatives), with small (0..3) and large (0..15) made from bits b3 b2 b1 b0 of the nibble:
//   small = (b2 ^ b1) (b1 ^ b0)                                 two bits, side by side
//   large = ~b3 (b3 ^ b2) ~b1 (b1 ^ (b0 & b2))                  four bits
// A search over pairs of such numbers found this; no pair needs only one step each (large takes two).
// mask: which bits of the word to keep.
uint e2m1_small(uint w, uint mask) {
    return (w ^ (w >> 1)) & mask;
}

uint e2m1_large(uint w) {
    const uint low_and = w & ((w >> 2) | 0xeeeeeeeeu);
    return low_and ^ ((w >> 1) | 0xaaaaaaaau);
}

// level + 12 as bytes, from 16 bytes of nibbles: byte j holds value j in its low nibble and value j + 16 in its high one.
void e2m1_plus_12(uvec4 codes, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        const uint large = e2m1_large(codes[i]);
        q[i] = 3u * e2m1_small(codes[i], 0x03030303u) + (large & 0x0f0f0f0fu);
        q[i + 4] = 3u * (e2m1_small(codes[i], 0x30303030u) >> 4) + ((large >> 4) & 0x0f0f0f0fu);
    }
}

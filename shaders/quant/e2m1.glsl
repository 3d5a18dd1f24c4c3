// The nibbles of MXFP4 and NVFP4: E2M1 codes of the file, put in an order (E2M1_ORDER in vkback/quants/mx.py) in which
//   level = 3 * small + large - 12
// is twice the value (0 1 2 3 4 6 8 12 and their negatives), where small (0..3) and large (0..15) come from a nibble's bits b3 b2 b1 b0 by
// bitwise steps that treat the eight nibbles of a word at once:
//   small = (b2 ^ b1) (b1 ^ b0)      large = ~b3 (b3 ^ b2) ~b1 (b1 ^ (b0 & b2))
// Found by a search over pairs of such numbers; with one step each, instead of two for `large`, there is none.
// mask: the bits of the nibbles that are wanted.
uint e2m1_small(uint w, uint mask) {
    return (w ^ (w >> 1)) & mask;
}

uint e2m1_large(uint w) {
    const uint low_and = w & ((w >> 2) | 0xeeeeeeeeu);
    return low_and ^ ((w >> 1) | 0xaaaaaaaau);
}

// 16 bytes of nibbles, byte j holds value j low and value j + 16 high, as bytes of level + 12.
void e2m1_plus_12(uvec4 codes, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        const uint large = e2m1_large(codes[i]);
        q[i] = 3u * e2m1_small(codes[i], 0x03030303u) + (large & 0x0f0f0f0fu);
        q[i + 4] = 3u * (e2m1_small(codes[i], 0x30303030u) >> 4) + ((large >> 4) & 0x0f0f0f0fu);
    }
}

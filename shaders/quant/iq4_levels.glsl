// The sixteen levels of IQ4_NL and IQ4_XS, computed rather than looked up:
//   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
// At load a unit's codes are cut into four words, one for each bit of a code (the bit order of quant/bit_planes.glsl), and renamed (IQ4_ORDER
// in vkback/quants/iq.py) so that each of the eight bits of a level is a short formula of the four bits of its code. One bitwise instruction
// then serves all 32 weights. The names come from a search for the fewest three-operand steps: eight, one for each bit of a level.
//
//   CODE_PAIRS  defined: the four words hold pairs of codes instead, byte 4w + 2h + p those of weights 16h + 4w + p (low) and that + 2 (high), as
//               quant/iq4_pairs.glsl wants them; here they are cut into bit planes first
#include "quant/bit_planes.glsl"

uint choose_bits(uint mask, uint where_set, uint elsewhere) {
    return (mask & where_set) | (~mask & elsewhere);
}

// Levels as bytes, byte b of q[i] for weight 4i + b. top: 0, or 0x80 for level + 128.
void iq4_levels(uvec4 code, uint top, out uint q[8]) {
#ifdef CODE_PAIRS
    // To four words of one bit each: weight 16h + 4w + 2c + p then has bit 16h + 8p + 4c + w.
    swap_bits(code.x, code.z, 0x33333333u, 2);
    swap_bits(code.y, code.w, 0x33333333u, 2);
    swap_bits(code.x, code.y, 0x55555555u, 1);
    swap_bits(code.z, code.w, 0x55555555u, 1);
#endif
    const uint a = code.x, b = code.y, c = code.z, d = code.w;
    const uint bit7 = choose_bits(d, b, a);
    const uint bit1 = choose_bits(a, c, bit7 & ~c);
    const uint bit4 = choose_bits(d, ~a, b);
    const uint bit5 = b ^ bit1 ^ bit4;
    const uint bit6 = c ^ (bit5 & ~bit7);
    const uint bit3 = (bit5 ^ b ^ d) | (b & d);
    const uint bit2 = choose_bits(bit3, d, c);
    const uint bit0 = ~(a & (bit3 ^ bit2));
    const uint plane[8] = {bit0, bit1, bit2, bit3, bit4, bit5, bit6, top != 0u ? ~bit7 : bit7};
    bytes_of_planes(plane, q);
#ifdef CODE_PAIRS
    // Byte 2h + p of q[4c + w] is weight 16h + 4w + 2c + p.
    [[unroll]] for (int w = 0; w < 4; w++) {
        const uint low = q[w], high = q[w + 4];
        q[w] = (low & 0xffffu) | (high << 16);
        q[w + 4] = (low >> 16) | (high & 0xffff0000u);
    }
#endif
}

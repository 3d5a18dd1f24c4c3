// The sixteen levels of IQ4_NL and IQ4_XS, without a look-up:
//   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
// A unit's codes are four words of bits (quant/bit_planes.glsl), in an order (IQ4_ORDER in vkback/quants/iq.py) in which the eight bits of
// the level are short formulas of the code's bits: a step serves 32 weights. Found by a search over orders for the fewest steps of three
// operands each: eight, one for every bit.
#include "quant/bit_planes.glsl"

uint choose_bits(uint mask, uint where_set, uint elsewhere) {
    return (mask & where_set) | (~mask & elsewhere);
}

// Bytes of the levels; top: 0x80 makes bytes of level + 128.
void iq4_levels(uvec4 code, uint top, out uint q[8]) {
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
}

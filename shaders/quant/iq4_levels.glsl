// The sixteen levels of IQ4_NL and IQ4_XS, without a look-up:
//   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
// A unit's codes are four words of bits (quant/bit_planes.glsl), in an order (IQ4_ORDER in vkback/quants/iq.py) in which the eight bits of
// level + 128 are short formulas of the code's bits: a step serves 32 weights. Found by a search over orders for the fewest steps of three
// operands each: eight, one for every bit.
#include "quant/bit_planes.glsl"

uint choose_bits(uint mask, uint where_set, uint elsewhere) {
    return (mask & where_set) | (~mask & elsewhere);
}

// top: 0xffffffff makes bytes of level + 128, 0 of the level itself.
void iq4_levels(uvec4 code, uint top, out uint q[8]) {
    const uint bit7 = choose_bits(code.z, code.x, code.w);
    const uint bit4 = choose_bits(code.z, code.w, ~code.x);
    const uint bit1 = (code.y | (code.w & bit7)) ^ code.w;
    const uint bit5 = ~(code.x ^ bit1 ^ bit4);
    const uint bit6 = code.y ^ (bit7 & bit5);
    const uint bit3 = choose_bits(bit5, code.x ^ code.z, code.z | ~code.x);
    const uint bit2 = choose_bits(bit3, code.z, code.y);
    const uint bit0 = code.w | ~(bit3 ^ bit2);
    const uint plane[8] = {bit0, bit1, bit2, bit3, bit4, bit5, bit6, bit7 ^ ~top};
    bytes_of_planes(plane, q);
}

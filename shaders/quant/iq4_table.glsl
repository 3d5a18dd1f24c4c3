// The sixteen levels of IQ4_NL and IQ4_XS, without a look-up:
//   -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
// Each four are nearly a straight line in the two low bits `low` of the code. What is missing is small and made of `curve` = 0, 0, 1, 3 and
// `both` = 0, 0, 0, 1; the two high bits choose among the four lines. Bytes hold two's complement; none carries into the next.

// Four codes at once, one a byte; what stands in the upper halves of the bytes does not matter.
uint iq4_levels(uint codes) {
    const uint low = codes & 0x03030303u;
    const uint second = (codes >> 1) & 0x01010101u;
    const uint both = low & second;
    const uint curve = second + 2u * both;
    const uint line0 = 0x81818181u + 23u * low - 2u * curve - both;
    const uint line1 = 0xcfcfcfcfu + 14u * low - curve;
    const uint line2 = 0x01010101u + 12u * low + both;
    const uint line3 = 0x35353535u + 16u * low + 4u * curve;
    const uint odd = ((codes >> 2) & 0x01010101u) * 255u;
    const uint upper = ((codes >> 3) & 0x01010101u) * 255u;
    const uint negative = line0 ^ ((line0 ^ line1) & odd);
    const uint positive = line2 ^ ((line2 ^ line3) & odd);
    return negative ^ ((negative ^ positive) & upper);
}

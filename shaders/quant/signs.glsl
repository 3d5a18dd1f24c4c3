// Signs of the IQ2 and IQ3 types: a sign code of seven bits stands for eight signs, since the number of minus signs is even.

// Four magnitudes, one in each byte and none 0, negated where a bit of `negative` (bits 0..3) is set.
// As none is 0, no byte carries into the next.
uint with_signs(uint magnitudes, uint negative) {
    const uint ones = (negative * 0x00204081u) & 0x01010101u;
    return (magnitudes ^ (ones * 255u)) + ones;
}

// Four sign codes, one in each byte, to four bytes of eight signs: bit 7 is the parity of the others.
uint even_signs(uint codes) {
    uint parity = codes ^ (codes >> 4);
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return codes | ((parity & 0x01010101u) << 7);
}

// Four sign codes of seven bits, packed without gaps, to four bytes of eight signs.
uint spread_signs(uint codes) {
    const uint pairs = (codes & 0x3fffu) | ((codes << 2) & 0x3fff0000u);
    return even_signs((pairs & 0x007f007fu) | ((pairs << 1) & 0x7f007f00u));
}

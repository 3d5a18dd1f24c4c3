// The sixteen levels of IQ4_NL and IQ4_XS as signed bytes, four a word.
const uint IQ4_LEVELS[4] = uint[](0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);

uint iq4_level(uint code) {
    return (IQ4_LEVELS[code >> 2] >> (8u * (code & 3u))) & 0xffu;
}

// Four codes at once, one a byte.
uint iq4_levels(uint codes) {
    return iq4_level(codes & 15u) | (iq4_level((codes >> 8) & 15u) << 8) | (iq4_level((codes >> 16) & 15u) << 16)
        | (iq4_level((codes >> 24) & 15u) << 24);
}

// Codebooks of IQ1, IQ2 and IQ3 in shared memory: an index stands for 8 weights (IQ1, IQ2) or 4 (IQ3). The including file first includes
// generated/<type>_codes.glsl, which has 16 bits per entry (bit order: vkback/ops/codebooks.py), and defines ENTRY, the type that a look-up
// returns, and ENTRY entry(uint codes), which makes it from the 16 bits after spread_codes.
//
//   CODEBOOK_LITERALS  0: all threads copy entries from a constant array to shared memory, already unpacked
//                      1: one thread stores them as literals, and each look-up unpacks its entry. For CPU drivers: llvmpipe (Mesa 22) makes a
//                      constant array a variable of each thread and takes 18 s to compile its 1024 stores, but 0.5 s for 1024 literals
#define UNIT_TABLE

// Level numbers of weights 0..3 in the low bits of bytes 0..3; IQ1 and IQ2 have those of weights 4..7 two bits above.
uint spread_codes(uint bits16) {
    return bits16 | (bits16 << 12);
}

#if CODEBOOK_LITERALS

void unit_table(uint thread, uint threads) {
    if (thread == 0) store_codes();
}

ENTRY look_up(uint index) {
    const uint pair = codes[index >> 3][(index >> 1) & 3u];
    return entry(spread_codes((pair >> (16 * (index & 1))) & 0xffffu));
}

#else

shared ENTRY codebook[2 * CODE_WORDS];

void unit_table(uint thread, uint threads) {
    for (uint i = thread; i < CODE_WORDS; i += threads) {
        const uint pair = CODES[i];
        codebook[2 * i] = entry(spread_codes(pair & 0xffffu));
        codebook[2 * i + 1] = entry(spread_codes(pair >> 16));
    }
}

ENTRY look_up(uint index) {
    return codebook[index];
}

#endif

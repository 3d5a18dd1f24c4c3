// Code books of IQ1, IQ2 and IQ3, in shared memory. The including file has included generated/<type>_codes.glsl, 16 bits an entry (bit order
// in vkback/ops/code_books.py), and has ENTRY, what a look-up gives, and ENTRY entry(uint codes), which makes it from spread 16 bits.
//
//   CODE_BOOK_LITERAL  0: all threads bring entries over from a constant array, made ready for use
//                      1: one thread stores literals, a look-up makes the entry. For CPU drivers: llvmpipe (Mesa 22) keeps a constant array
//                      as a variable of each thread and compiles its 1024 stores in 18 s, 1024 literals in 0.5 s
#define UNIT_TABLE

// Level numbers of weights 0..3 in bytes 0..3; those of weights 4..7 two bits above.
uint spread_codes(uint bits16) {
    return bits16 | (bits16 << 12);
}

#if CODE_BOOK_LITERAL

void unit_table(uint thread, uint threads) {
    if (thread == 0) store_codes();
}

ENTRY look_up(uint index) {
    const uint pair = codes[index >> 3][(index >> 1) & 3u];
    return entry(spread_codes((pair >> (16 * (index & 1))) & 0xffffu));
}

#else

shared ENTRY code_book[2 * CODE_WORDS];

void unit_table(uint thread, uint threads) {
    for (uint i = thread; i < CODE_WORDS; i += threads) {
        const uint pair = CODES[i];
        code_book[2 * i] = entry(spread_codes(pair & 0xffffu));
        code_book[2 * i + 1] = entry(spread_codes(pair >> 16));
    }
}

ENTRY look_up(uint index) {
    return code_book[index];
}

#endif

// IQ4_NL and IQ4_XS by a table of pairs of levels in shared memory, where codes lie in pairs (CODE_PAIRS): a look-up gives two levels.
//
// A byte of qs is the number of an entry: byte 4w + 2h + p has the codes of weights 16h + 4w + p and that + 2, which are bytes p and p + 2 of
// word 4h + w of the 32 levels. An entry is a word with one level in byte 0 and one in byte 2, so two of them, one shifted, make that word.
// The lanes of a subgroup have a copy each, side by side: with 32, as many as there are banks, look-ups never meet in one (32 KB).
//
// A dot product picks a byte of qs and multiplies it by the distance of two entries in one instruction, and on NVIDIA not in the unit that
// shifts and masks, which bounds the formulas of quant/iq4_levels.glsl.
#define UNIT_TABLE
#define X_WITHOUT_SUMS  // levels have no offset; shared memory is scarce beside the table
#define PAIR_LANES uint(SUBGROUP < 32 ? SUBGROUP : 32)
#define PAIR_ENTRIES 256u

shared uint pairs[PAIR_ENTRIES * PAIR_LANES];

// The level of a code, in byte 0. The codes have the names of IQ4_ORDER (vkback/quants/iq.py).
uint level_of(uint code) {
    const uint four = code < 8u ? (code < 4u ? 0x98198101u : 0xf659ea45u) : (code < 12u ? 0xadbf0d71u : 0xcfdd2635u);
    return (four >> (8u * (code & 3u))) & 0xffu;
}

// Lane by lane, entry by entry. Where the entries that are stored at once divide 32, those of a thread have one low code a round, and for high
// ones constants, or one of two: few instructions beside the stores.
void unit_table(uint thread, uint threads) {
    const uint at_once = threads / PAIR_LANES, first = thread / PAIR_LANES;
    if (threads >= PAIR_LANES && 32u * PAIR_LANES % threads == 0u) {
        const uint tops = at_once == 32u ? 2u : 1u;
        for (uint code = 0u; code < 16u; code += at_once) {
            const uint low = level_of((first + code) & 15u);
            [[unroll]] for (uint top = 0u; top < 16u; top += tops) {
                const uint high = tops == 2u && first >= 16u ? level_of(top + 1u) : level_of(top);
                pairs[thread + PAIR_LANES * (code + 16u * top)] = low | (high << 16);
            }
        }
    } else
        for (uint i = thread; i < PAIR_ENTRIES * PAIR_LANES; i += threads) {
            const uint entry = i / PAIR_LANES;
            pairs[i] = level_of(entry & 15u) | (level_of(entry >> 4) << 16);
        }
}

// The product is a byte address, and the mask changes nothing of it: compilers see that its low bits are zero, and shift nothing.
uint pair_of(uint word, int byte) {
    const uint distance = 4u * PAIR_LANES, lane = gl_LocalInvocationIndex % PAIR_LANES;
    return pairs[((dot4_unsigned(word, distance << (8 * byte)) & (0xffu * distance)) | (4u * lane)) >> 2];
}

void levels_by_pairs(uvec4 codes, out uint q[8]) {
    [[unroll]] for (int w = 0; w < 4; w++)
        [[unroll]] for (int h = 0; h < 2; h++) q[4 * h + w] = pair_of(codes[w], 2 * h) + (pair_of(codes[w], 2 * h + 1) << 8);
}

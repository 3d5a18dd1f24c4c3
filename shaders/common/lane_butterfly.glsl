// LANE_BUTTERFLY(v, COMBINE, FIRST, END): butterfly reduction. Combines v over all lanes of a subgroup whose numbers differ only in bits FIRST
// up to, but not including, END (both powers of two). Uses shuffles; the includer enables the extension.
//
// Written out rather than as a loop: not every driver unrolls a loop that doubles its step, which costs over 1 us in a prologue on an H200.
#ifndef LANE_BUTTERFLY
#define LANE_BUTTERFLY(v, COMBINE, FIRST, END)                                                        \
    if (uint(FIRST) <= 1u && uint(END) > 1u) v = COMBINE(v, subgroupShuffleXor(v, 1u));               \
    if (uint(FIRST) <= 2u && uint(END) > 2u) v = COMBINE(v, subgroupShuffleXor(v, 2u));               \
    if (uint(FIRST) <= 4u && uint(END) > 4u) v = COMBINE(v, subgroupShuffleXor(v, 4u));               \
    if (uint(FIRST) <= 8u && uint(END) > 8u) v = COMBINE(v, subgroupShuffleXor(v, 8u));               \
    if (uint(FIRST) <= 16u && uint(END) > 16u) v = COMBINE(v, subgroupShuffleXor(v, 16u));            \
    if (uint(FIRST) <= 32u && uint(END) > 32u) v = COMBINE(v, subgroupShuffleXor(v, 32u));
#define BUTTERFLY_ADD(a, b) ((a) + (b))
#endif

// OVER_LANES(v, COMBINE, FIRST, END): v combined over the lanes of a subgroup whose numbers differ in the bits from FIRST up to, without, END,
// both powers of two. By shuffles; who includes it enables them.
//
// Written out: a loop that doubles its step is not unrolled by every driver, and costs an H200 over 1 us in a kernel's prologue.
#ifndef OVER_LANES
#define OVER_LANES(v, COMBINE, FIRST, END)                                                            \
    if (uint(FIRST) <= 1u && uint(END) > 1u) v = COMBINE(v, subgroupShuffleXor(v, 1u));               \
    if (uint(FIRST) <= 2u && uint(END) > 2u) v = COMBINE(v, subgroupShuffleXor(v, 2u));               \
    if (uint(FIRST) <= 4u && uint(END) > 4u) v = COMBINE(v, subgroupShuffleXor(v, 4u));               \
    if (uint(FIRST) <= 8u && uint(END) > 8u) v = COMBINE(v, subgroupShuffleXor(v, 8u));               \
    if (uint(FIRST) <= 16u && uint(END) > 16u) v = COMBINE(v, subgroupShuffleXor(v, 16u));            \
    if (uint(FIRST) <= 32u && uint(END) > 32u) v = COMBINE(v, subgroupShuffleXor(v, 32u));
#define OVER_ADD(a, b) ((a) + (b))
#endif

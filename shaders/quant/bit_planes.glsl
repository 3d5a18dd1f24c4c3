// From bit planes to bytes: 32 eight-bit numbers, given as eight words that hold one bit of each. Bit 8b + i of plane[k] is bit k of number
// 4i + b. Each of the four byte columns is thus an 8x8 matrix of bits, which is transposed in three steps (swap 4x4, 2x2 and 1x1 blocks).
//
//   SWAP_BITS  how a step selects bits; the results are the same. SWAP_BY_XOR: what AMD's compiler makes one instruction of
//              SWAP_DIFFERENCES: NVIDIA's driver was the fastest with it, ahead of xor with a mask that it does not know
//              SWAP_BY_MASKS: for Adreno, which shifts and masks in one instruction
#define SWAP_BY_XOR 0
#define SWAP_DIFFERENCES 1
#define SWAP_BY_MASKS 2
#ifndef SWAP_BITS
#define SWAP_BITS SWAP_BY_XOR
#endif

// Exchanges the bits of `low` outside `mask` with the bits of `high` that stand `by` positions lower.
void swap_bits(inout uint low, inout uint high, uint mask, int by) {
#if SWAP_BITS == SWAP_DIFFERENCES
    const uint differences = ((low >> by) ^ high) & mask;
    high ^= differences;
    low ^= differences << by;
#else
    const uint up = high << by, down = low >> by;
  #if SWAP_BITS == SWAP_BY_MASKS
    low = (low & mask) | (up & ~mask);
    high = (down & mask) | (high & ~mask);
  #else
    low = ((low ^ up) & mask) ^ up;
    high = ((high ^ down) & mask) ^ high;
  #endif
#endif
}

// Byte b of q[i] is number 4i + b.
void bytes_of_planes(uint plane[8], out uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = plane[i];
    [[unroll]] for (int i = 0; i < 4; i++) swap_bits(q[i], q[i + 4], 0x0f0f0f0fu, 4);
    [[unroll]] for (int i = 0; i < 8; i++)
        if ((i & 2) == 0) swap_bits(q[i], q[i + 2], 0x33333333u, 2);
    [[unroll]] for (int i = 0; i < 8; i += 2) swap_bits(q[i], q[i + 1], 0x55555555u, 1);
}

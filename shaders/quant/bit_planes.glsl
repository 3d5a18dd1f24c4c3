// From bit planes to bytes: 32 eight-bit numbers, given as eight words that hold one bit of each. Bit 8b + i of plane[k] is bit k of number
// 4i + b. Each of the four byte columns is thus an 8x8 matrix of bits, which is transposed in three steps (swap 4x4, 2x2 and 1x1 blocks).
//
// A step selects bits by xor and a mask that the compiler does not know (unknown_zero in quant/place.glsl): one instruction on NVIDIA.
//
//   BITS_BY_MASKS  1: select by and, or with constant masks instead: for Adreno, which shifts and masks in one instruction
#ifndef BITS_BY_MASKS
#define BITS_BY_MASKS 0
#endif

// Exchanges the bits of `low` outside `mask` with the bits of `high` that stand `by` positions lower.
void swap_bits(inout uint low, inout uint high, uint mask, int by) {
    const uint up = high << by, down = low >> by;
#if BITS_BY_MASKS
    low = (low & mask) | (up & ~mask);
    high = (down & mask) | (high & ~mask);
#else
    mask ^= unknown_zero();
    low = ((low ^ up) & mask) ^ up;
    high = ((high ^ down) & mask) ^ high;
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

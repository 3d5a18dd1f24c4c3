// 32 numbers of eight bits as eight words of bits, and as bytes. Bit 8b + i of plane[k] is bit k of number 4i + b: each of the four byte columns
// is a square of 8 by 8 bits, which is turned over its diagonal in three steps.

// A choice of bits is an exclusive or by a mask that the compiler does not know (unknown_zero in quant/place.glsl).
//
//   BITS_BY_MASKS  1: choices by masks and constants, for Adreno, which shifts and masks in one instruction
#ifndef BITS_BY_MASKS
#define BITS_BY_MASKS 0
#endif

// The bits of `low` at the positions that `mask` leaves out change places with those of `high` at the positions `by` lower.
void exchange_bits(inout uint low, inout uint high, uint mask, int by) {
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

// Byte b of q[i] becomes number 4i + b.
void bytes_of_planes(uint plane[8], out uint q[8]) {
    [[unroll]] for (int i = 0; i < 8; i++) q[i] = plane[i];
    [[unroll]] for (int i = 0; i < 4; i++) exchange_bits(q[i], q[i + 4], 0x0f0f0f0fu, 4);
    [[unroll]] for (int i = 0; i < 8; i++)
        if ((i & 2) == 0) exchange_bits(q[i], q[i + 2], 0x33333333u, 2);
    [[unroll]] for (int i = 0; i < 8; i += 2) exchange_bits(q[i], q[i + 1], 0x55555555u, 1);
}

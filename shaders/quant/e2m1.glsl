// E2M1 codes of MXFP4 and NVFP4: 32 nibbles (as split_nibbles takes them) to bytes with twice the value (0 1 2 3 4 6 8 12 and their
// negatives) + 16, in 4..28.
//
// A nibble is s a x y: the codes of the file with 5 and 6 exchanged, so that the magnitude is 4a + 2x + y + ay(3 + 2x), at most 12 and thus a
// nibble itself: eight are worked out in a word. The negative ones are taken off twice.
void e2m1_plus_16(uvec4 codes, out uint q[8]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        const uint w = codes[i];
        const uint ay = (w >> 2) & w & 0x11111111u;
        const uint axy = (w >> 1) & ay;
        const uint magnitude = (w & 0x77777777u) + 3u * ay + 2u * axy;
        const uint negative = magnitude & (((w >> 3) & 0x11111111u) * 15u);
        q[i] = ((magnitude & 0x0f0f0f0fu) | 0x10101010u) - 2u * (negative & 0x0f0f0f0fu);
        q[i + 4] = (((magnitude >> 4) & 0x0f0f0f0fu) | 0x10101010u) - 2u * ((negative >> 4) & 0x0f0f0f0fu);
    }
}

// The depthwise convolution of Mamba-2: each channel by itself, TAPS taps, the last one on the token itself.
//
// Inputs of tokens before the batch come from the conv state, a ring buffer of RING rows, TAPS unless said otherwise: row p % RING is the input of
// the token at position p. Positions below 0 count as zeros, so a new sequence need not clear the state.
//
//   CONV_X(token, c)      input of a token of this batch
//   CONV_ROW(row, c)      row of the conv state
#ifndef RING
#define RING TAPS
#endif

// The exponent is clamped, so that exp stays finite; silu(-88) is 0 anyway.
float silu(float v) { return v / (1.0 + exp(min(-v, 88.0))); }

// The input `back` tokens before token t, which is at position `pos`.
#define CONV_TAP(t, pos, c, back) \
    ((t) >= (back) ? CONV_X((t) - (back), c) : (pos) >= int(back) ? CONV_ROW(uint((pos) - int(back)) % RING, c) : 0.0)

// The convolution of Mamba-2: every channel by itself, TAPS taps, the last one on the token itself.
//
// What a token needs of the tokens before its batch comes from the conv state, a ring of TAPS rows: row p % TAPS is the input of the token at
// position p. Positions below 0 count as zeros, so that a sequence needs no clearing of the state before its first token.
//
//   CONV_X(token, c)      input of a token of this batch
//   CONV_ROW(row, c)      row of the conv state

// exp of large numbers is kept finite: silu(-88) is 0 anyway.
float silu(float v) { return v / (1.0 + exp(min(-v, 88.0))); }

// Value of the tap `back` tokens before token t, which is at position `pos`.
#define CONV_TAP(t, pos, c, back) \
    ((t) >= (back) ? CONV_X((t) - (back), c) : (pos) >= int(back) ? CONV_ROW(uint((pos) - int(back)) % TAPS, c) : 0.0)

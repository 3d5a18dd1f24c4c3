// What the IQ1 types share: ternary digits from a code book by eight.
#include "generated/iq1_s_codes.glsl"
#define ENTRY uint

// Digits 0..2 of weights 0..3 in the low two bits of each byte, of 4..7 in the next two.
uint entry(uint codes) {
    return codes & 0x0f0f0f0fu;
}
#include "quant/code_book.glsl"

// What IQ1_S and IQ1_M share: a codebook whose entries are eight ternary digits.
#include "generated/iq1_s_codes.glsl"
#define ENTRY uint

// Digits 0..2: of weights 0..3 in the low two bits of each byte, of weights 4..7 in the next two.
uint entry(uint codes) {
    return codes & 0x0f0f0f0fu;
}
#include "quant/codebook.glsl"

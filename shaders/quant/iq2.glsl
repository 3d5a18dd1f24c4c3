// What the IQ2 types share: a codebook whose entries are eight magnitudes (8, 25 or 43), and signs.
#include "quant/signs.glsl"
#define ENTRY uvec2

uint iq2_levels(uint codes) {
    return 0x08080808u + codes * 17u + ((codes >> 1) & 0x01010101u);
}

uvec2 entry(uint codes) {
    return uvec2(iq2_levels(codes & 0x03030303u), iq2_levels((codes >> 2) & 0x03030303u));
}
#include "quant/codebook.glsl"

// The eight weights of a codebook index, into q[2 group] and q[2 group + 1]. signs: one bit for each, set for minus.
void iq2_group(uint index, uint signs, uint group, inout uint q[8]) {
    const uvec2 magnitudes = look_up(index);
    q[2 * group] = with_signs(magnitudes.x, signs & 15u);
    q[2 * group + 1] = with_signs(magnitudes.y, (signs >> 4) & 15u);
}

// Encodes a unit of 32 values as Q8_0 or Q4_0: the scale, and words of four bytes as they lie in the device layout.
// The rules are those of vkback/quants.
//
//   float unit_scale(vec4 v[8], uint type)                d, not yet rounded to F16; type: CACHE_Q8_0 or CACHE_Q4_0
//   float reciprocal(float d)                             the factor for the values; 0 for a d of (almost) 0
//   uint q8_0_word(vec4 v, float inverse)                 four neighbouring values
//   uint q4_0_word(vec4 low, vec4 high, float inverse)    values 4 i .. and 16 + 4 i .. of the unit; the top bit of high nibbles is flipped

#extension GL_EXT_control_flow_attributes : require

#ifndef CACHE_Q8_0
#define CACHE_Q8_0 1
#define CACHE_Q4_0 2
#endif

uint magnitude_bits(float v) { return floatBitsToUint(v) & 0x7fffffffu; }

float reciprocal(float v) { return abs(v) < 1e-38 ? 0.0 : 1.0 / v; }

// Scales by the value farthest from zero, the first one of equals: it becomes 127 steps (Q8_0), or -8 (Q4_0). Magnitudes are compared as bits,
// where NaN is above all numbers: its unit gets a scale of NaN.
float unit_scale(vec4 v[8], uint type) {
    float extreme = 0.0;
    [[unroll]] for (uint j = 0; j < 8; j++)
        [[unroll]] for (uint c = 0; c < 4; c++) extreme = magnitude_bits(v[j][c]) > magnitude_bits(extreme) ? v[j][c] : extreme;
    return type == CACHE_Q8_0 ? abs(extreme) / 127.0 : extreme / -8.0;
}

uint packed_bytes(uvec4 bytes) { return bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24; }

uint q8_0_word(vec4 v, float inverse) {
    const vec4 steps = v * inverse;
    return packed_bytes(uvec4(ivec4(sign(steps) * min(floor(abs(steps) + 0.5), 127.0))) & 0xffu);
}

uvec4 nibbles_of(vec4 v, float inverse) { return uvec4(clamp(trunc(v * inverse + 8.5), 0.0, 15.0)); }

uint q4_0_word(vec4 low, vec4 high, float inverse) {
    return packed_bytes(nibbles_of(low, inverse) | nibbles_of(high, inverse) << 4) ^ 0x80808080u;
}

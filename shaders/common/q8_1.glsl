// Quantizes rows of F32 to Q8_1 and stores them (layout in docs/weight_layout.md). For each unit of 32 values: d = max |x| / 127, q =
// roundEven(x / d). A row is: `units` x 16 bytes of int8 (values 0..15 of each unit), `units` x 16 bytes (values 16..31), then 8 bytes a unit:
// f32 d and two int16, the sums of the int8 of each half.
//
// Eight neighbouring threads share a unit: quad = 8 * unit + lane, four values each.
// All eight call q8_1_pack together (with REDUCE_SUBGROUP 0, all threads of the workgroup):
//   Q8_1Quad q8_1_pack(uint quad, vec4 v)                               quantizes these four values
//   void q8_1_store(uint row, uint units, uint quad, Q8_1Quad packed)   stores them
// Packing has no branches, so a thread with several quads should pack them all before it stores: the reductions then overlap.
//
// The including shader has a buffer `uint y_words[]` (or defines Q8_1_PACK_ONLY), and includes common/reduce.glsl with REDUCE_GROUPS 1 first.

#include "common/int16.glsl"

struct Q8_1Quad {
    uint word;    // four int8
    uint d;
    uint halves;  // sums of the int8 of both halves, two int16
};

Q8_1Quad q8_1_pack(uint quad, vec4 v) {
    // Compare magnitudes as bits: NaN is then larger than any number, so d becomes NaN and the error shows. max() of floats may drop a NaN.
    const uvec4 magnitude = floatBitsToUint(v) & 0x7fffffffu;
    float d = uintBitsToFloat(group_max(max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)), 8u)) / 127.0;
    // Below 2^-126 a device may flush d to zero, and 1 / d overflows.
    d = d < 1.17549435e-38 ? 0.0 : d;
    const float inverse = d > 0.0 ? 1.0 / d : 0.0;
    // Adding 1.5 * 2^23 makes the last bit of a float worth 1: the addition rounds to even, and the low bits hold the integer in two's
    // complement. Round and convert instructions would run on NVIDIA's special function unit, at an eighth of the rate. The clamp also keeps
    // the compiler from contracting product and sum to an fma, in which case a token's bits would depend on the kernel that quantized it.
    const uvec4 q = floatBitsToUint(clamp(v * inverse, -127.0, 127.0) + 12582912.0) - 0x4b400000u;
    // Add both halves' sums in one word: each is at most 16 * 127 in size. The lower one's borrow from the upper is undone below.
    const uint four = q.x + q.y + q.z + q.w;
    const uint both = group_sum((quad & 4u) != 0u ? four << 16 : four, 8u);
    const int lower = int16_pair(both).x;
    const uvec4 b = q & 0xffu;
    return Q8_1Quad(b.x | (b.y << 8) | (b.z << 16) | (b.w << 24), floatBitsToUint(d), int16_word(ivec2(lower, (int(both) - lower) >> 16)));
}

#ifndef Q8_1_PACK_ONLY
uint q8_1_stride(uint units) { return (units * 10u + 3u) & ~3u; }

void q8_1_store(uint row, uint units, uint quad, Q8_1Quad packed) {
    const uint unit = quad >> 3;
    const uint base = row * q8_1_stride(units);
    y_words[base + ((quad & 4u) != 0u ? units * 4u : 0u) + unit * 4u + (quad & 3u)] = packed.word;
    if ((quad & 7u) == 0u) {
        y_words[base + units * 8u + unit * 2u] = packed.d;
        y_words[base + units * 8u + unit * 2u + 1u] = packed.halves;
    }
}
#endif

// Writes Q8_1 rows (docs/architecture.md): per row `units` x 16 bytes of int8 (values 0..15 of each unit), again for values 16..31, then 8 bytes
// a unit: f32 d, two int16, the sums of the halves' int8.
//
// The including shader has a uint buffer y_words[] (without one it defines Q8_1_PACK_ONLY) and includes common/reduce.glsl with
// REDUCE_GROUPS 1.
//   Q8_1Quad q8_1_pack(uint quad, vec4 v)                               four values of a unit, and what the unit has in common
//   void q8_1_store(uint row, uint units, uint quad, Q8_1Quad packed)   writes them
// Eight neighbouring threads hold one unit: quad = 8 * unit + lane, four values each. All eight pack together, with REDUCE_SUBGROUP 0 every thread
// of the workgroup. Packing has no branches, so that a thread with several quads can have them all under way: pack all, then store.

#include "common/int16.glsl"

struct Q8_1Quad {
    uint word;    // four int8
    uint d;
    uint halves;  // the sums of both halves' int8, two int16
};

Q8_1Quad q8_1_pack(uint quad, vec4 v) {
    // Sizes as bits: there a NaN is larger than any number, so d is one too. Of floats max() may drop it, and nobody would notice.
    const uvec4 size = floatBitsToUint(v) & 0x7fffffffu;
    float d = uintBitsToFloat(group_max(max(max(size.x, size.y), max(size.z, size.w)), 8u)) / 127.0;
    // Below 2^-126 a device may flush d to zero, and 1 / d overflows.
    d = d < 1.17549435e-38 ? 0.0 : d;
    const float inverse = d > 0.0 ? 1.0 / d : 0.0;
    // 1.5 * 2^23 added, a float's last bit is worth 1: the sum rounds to even, and its last bits are the number in two's complement. Rounding
    // and converting by themselves go through NVIDIA's unit for special functions, which takes an eighth as many a clock. The clamp keeps product
    // and sum apart: where one kernel rounded them together and another did not, a token's bits would depend on its kernel.
    const uvec4 q = floatBitsToUint(clamp(v * inverse, -127.0, 127.0) + 12582912.0) - 0x4b400000u;
    // Both halves' sums in one word: each stays within 16 * 127 in size, and the borrow of the lower is undone below.
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

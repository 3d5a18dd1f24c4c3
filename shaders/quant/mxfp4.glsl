// MXFP4: 32 weights in 17 bytes. Planes: qs (E2M1 nibbles) 16, e (E8M0 exponent) 1.
// weight = level * 2^(e - 128), where level is twice the E2M1 value: 0 1 2 3 4 6 8 12 and their negatives (quant/e2m1.glsl).
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/e2m1.glsl"

struct UnitRaw { uvec4 qs; uint e; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 2), unit_index(at, 4u));
}

float e8m0_to_f32_half(UnitRaw r) {
    const uint e = byte_of(r.e, r.index);
    return uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
}

#if PATH_INT
#define UNIT_DOT 0.0625
#define UNIT_WORDS 16
// q[0..3]: large of the first half. q[4..7]: 16 * (large - 8) of the second, signed, which needs no shift. q[8..11]: small of the first half.
// q[12..15]: 16 * small of the second. unit_dot multiplies the first half by 16, too; UNIT_DOT = 1/16 takes that back.
void unit_words(UnitRaw r, out uint q[16]) {
    [[unroll]] for (int i = 0; i < 4; i++) {
        const uint large = e2m1_large(r.qs[i]);
        q[i] = large & 0x0f0f0f0fu;
        q[i + 4] = (large & 0xf0f0f0f0u) ^ 0x80808080u;
        q[i + 8] = e2m1_small(r.qs[i], 0x03030303u);
        q[i + 12] = e2m1_small(r.qs[i], 0x30303030u);
    }
}

float unit_dot(UnitRaw r, uint q[16], uint x[8], ivec2 sum) {
    int first = -12 * sum.x, second_16 = -64 * sum.y, small = 0, small_16 = 0;
    [[unroll]] for (int i = 0; i < 4; i++) {
        first += dot4(q[i], x[i]);
        second_16 += dot4(q[i + 4], x[i + 4]);
        small += dot4(q[i + 8], x[i]);
        small_16 += dot4(q[i + 12], x[i + 4]);
    }
    return e8m0_to_f32_half(r) * float(16 * (first + 3 * small) + second_16 + 3 * small_16);
}
#endif

#ifdef LEVEL_TABLE
// The sixteen levels, halved, as floats in shared memory, each in a bank of its own: a look-up per weight instead of bitwise steps and a
// conversion. Halved, because the scale is then 2^(e - 127), a float with e as its exponent bits. For e = 0 that is 0: such weights, at most
// 2^-124, count as 0.
//   LEVEL_TABLE 1: a mask leaves four codes in four bytes, which hardware with byte operands turns into addresses directly
//   LEVEL_TABLE 2: each code is extracted as a bit field, for hardware that cannot do so (GCN 4 beside a constant; RDNA 3 and later never)
#define UNIT_TABLE
#define UNIT_QUANTS
shared float e2m1_half_levels[16];

void unit_table(uint thread, uint threads) {
    for (uint i = thread; i < 16u; i += threads) e2m1_half_levels[i] = 0.5 * float(int(3u * e2m1_small(i, 3u) + (e2m1_large(i) & 15u)) - 12);
}

void unit_quants(UnitRaw r, out vec4 w[8], out vec2 scale, out vec2 bias) {
    [[unroll]] for (int i = 0; i < 4; i++) {
  #if LEVEL_TABLE == 1
        const uint low = r.qs[i] & 0x0f0f0f0fu, high = (r.qs[i] >> 4) & 0x0f0f0f0fu;
  #endif
        [[unroll]] for (int b = 0; b < 4; b++) {
  #if LEVEL_TABLE == 1
            w[i][b] = e2m1_half_levels[bitfieldExtract(low, 8 * b, 8)];
            w[i + 4][b] = e2m1_half_levels[bitfieldExtract(high, 8 * b, 8)];
  #else
            w[i][b] = e2m1_half_levels[bitfieldExtract(r.qs[i], 8 * b, 4)];
            w[i + 4][b] = e2m1_half_levels[bitfieldExtract(r.qs[i], 8 * b + 4, 4)];
  #endif
        }
    }
    scale = vec2(uintBitsToFloat(byte_of(r.e, r.index) << 23));
    bias = vec2(0.0);
}
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    e2m1_plus_12(r.qs, q);
    scale = vec2(e8m0_to_f32_half(r));
    bias = 12.0 * scale;
}
#include "quant/decode_ints.glsl"

#ifdef DECODES_F16
// By way of subnormal f16 (gemm/unit_f16.glsl), eight weights in 21 instructions: the high nibbles' numbers are made three bits lower than they
// lie, which needs no shift of `small` and keeps each in its byte (8 * 24 = 192). The exponents' largest is 125.
#define UNIT_SUBNORMAL
void unit_subnormal(UnitRaw r, bool valid, out uvec4 words[4]) {
    // 2^(e - 128) * 2^18; of e = 0 it is 0, as f16 has it of all below 86.
    const float step = valid ? uintBitsToFloat(byte_of(r.e, r.index) << 23) * 131072.0 : 0.0;
    const f16vec2 s = f16vec2(step), s_high = s * f16vec2(0.125), b = s * f16vec2(-12.0 / 16777216.0);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint w = r.qs[i], w_1 = w >> 1, w_2 = w >> 2, at = 2u * (i & 1u);
        const uint large = (w & (w_2 | 0xeeeeeeeeu)) ^ (w_1 | 0xaaaaaaaau);
        const uint low = 3u * ((w ^ w_1) & 0x03030303u) + (large & 0x0f0f0f0fu);
        const uint high = 3u * ((w_1 ^ w_2) & 0x18181818u) + ((large >> 1) & 0x78787878u);
        words[i >> 1][at] = packFloat2x16(fma(unpackFloat2x16(low & 0x00ff00ffu), s, b));
        words[i >> 1][at + 1u] = packFloat2x16(fma(unpackFloat2x16((low >> 8) & 0x00ff00ffu), s, b));
        words[2u + (i >> 1)][at] = packFloat2x16(fma(unpackFloat2x16(high & 0x00ff00ffu), s_high, b));
        words[2u + (i >> 1)][at + 1u] = packFloat2x16(fma(unpackFloat2x16((high >> 8) & 0x00ff00ffu), s_high, b));
    }
}
#endif

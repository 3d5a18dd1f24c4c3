// F16 bits of what is stored in a KV cache, so that values beyond the range of f16 can neither be overlooked nor taken for others:
//
//   uint f16_bits(float v)      as packHalf2x16 gives them, in the lower half; but of a number that f16 cannot hold BEYOND_F16, and of an
//                               infinity or a NaN another NaN
//   uint f16_bits_of(vec2 v)    of two values, in both halves
//
// Attention over a row with a NaN gives NaN, whatever the query, so that the logits tell. Then the host looks for BEYOND_F16
// (vkback/models/cache_range.py). Magnitudes are compared as bits: a device may assume that floats are never NaN.

#define BEYOND_F16 0x7fffu
#define NAN_F16 0x7e00u

uint f16_bits(float v) {
    const uint magnitude = floatBitsToUint(v) & 0x7fffffffu;
    // 65520 and more would round to infinity.
    return magnitude < 0x477ff000u ? packHalf2x16(vec2(v, 0.0)) & 0xffffu : magnitude < 0x7f800000u ? BEYOND_F16 : NAN_F16;
}

uint f16_bits_of(vec2 v) {
    const uvec2 magnitude = floatBitsToUint(v) & 0x7fffffffu;
    return max(magnitude.x, magnitude.y) < 0x477ff000u ? packHalf2x16(v) : f16_bits(v.x) | f16_bits(v.y) << 16u;
}

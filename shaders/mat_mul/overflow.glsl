// Whether activations that are packed as f16 stay within its range. A thread notes the values that it packs, and reports in the end. The
// overflow word is zero until a value beyond 65504 was met, an infinity or a NaN; from then on it holds the bits of the largest size met.
// The host looks at it after a run: what was packed is worth nothing then (vkback/ops/f16_range.py).
//
// Sizes are compared as bits: those of floats without sign are in the order of the floats, infinity and NaN above all numbers.
//
// Defines: OVERFLOW_BINDING
layout(std430, set = 0, binding = OVERFLOW_BINDING) buffer Overflow { uint overflow; };

uint largest_size = 0u;

vec4 noted(vec4 v) {
    const uvec4 size = floatBitsToUint(v) & 0x7fffffffu;
    largest_size = max(largest_size, max(max(size.x, size.y), max(size.z, size.w)));
    return v;
}

void report_overflow() {
    if (largest_size > 0x477fe000u) atomicMax(overflow, largest_size);
}

// Detects activations that do not fit into f16. A thread notes the values that it packs and reports at the end. The overflow word stays zero
// until a value beyond 65504, an infinity or a NaN is met; then it holds the bits of the largest magnitude met. The host reads it after a run
// and, if it is not zero, discards the result (vkback/ops/f16_range.py).
//
// Magnitudes are compared as bits: without the sign, those of floats are ordered as the floats are, with infinity and NaN above all numbers.
//
// Defines: OVERFLOW_BINDING
layout(std430, set = 0, binding = OVERFLOW_BINDING) buffer Overflow { uint overflow; };

uint largest_magnitude = 0u;

vec4 track_overflow(vec4 v) {
    const uvec4 magnitude = floatBitsToUint(v) & 0x7fffffffu;
    largest_magnitude = max(largest_magnitude, max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
    return v;
}

void report_overflow() {
    if (largest_magnitude > 0x477fe000u) atomicMax(overflow, largest_magnitude);
}

// Divides a head into slots of two neighbouring pairs of dimensions: four values, which make two words in f16.
//
//   ROTATED_SLOTS                                          number of slots that RoPE rotates: the first ones of a head
//   uvec2 places(uint slot)                                the two places of a slot within its head, in units of two values
//   void rotate(inout vec2 a, inout vec2 b, vec4 angles)   rotates the values at these places; angles: (cos, sin) of each pair
//
// Defines: ROPE_PAIRS (even: n_dims / 2; 0: no RoPE), which may be a value of the includer; ROPE_NEOX (1: dimension i is paired with
// i + ROPE_PAIRS, 0: with its neighbour, or there is no RoPE)
#include "rope/rotate.glsl"

#define ROTATED_SLOTS (ROPE_PAIRS / 2)

uvec2 places(uint slot) {
#if ROPE_NEOX
    if (slot < ROTATED_SLOTS) return uvec2(slot, slot + ROTATED_SLOTS);
#endif
    return uvec2(2u * slot, 2u * slot + 1u);
}

void rotate(inout vec2 a, inout vec2 b, vec4 angles) {
#if ROPE_NEOX
    const vec2 x = rotate_pair(vec2(a.x, b.x), angles.xy), y = rotate_pair(vec2(a.y, b.y), angles.zw);
    a = vec2(x.x, y.x);
    b = vec2(x.y, y.y);
#else
    a = rotate_pair(a, angles.xy);
    b = rotate_pair(b, angles.zw);
#endif
}

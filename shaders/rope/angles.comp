#version 450
// Cosine and sine of every pair of dimensions at the positions of the tokens (ROPE_ANGLES), once for all layers and heads.
//
//   angles  vec2 [tokens, ROPE_PAIRS]
//
// Defines: WG_SIZE, FACTORS (1: frequency factors are bound), those of rope/rope.glsl
#include "rope/rope.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push { uint count; } p;    // tokens * ROPE_PAIRS

layout(std430, set = 0, binding = 0) readonly buffer Pos { int pos[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Angles { vec2 angles[]; };
#if FACTORS
layout(std430, set = 0, binding = 2) readonly buffer Factors { float factors[]; };
#endif

void main() {
    const uint i = gl_GlobalInvocationID.x;
    if (i >= p.count) return;
    const uint pair = i % ROPE_PAIRS;
#if FACTORS
    angles[i] = rope_angle(pair, pos[i / ROPE_PAIRS], factors[pair]);
#else
    angles[i] = rope_angle(pair, pos[i / ROPE_PAIRS]);
#endif
}

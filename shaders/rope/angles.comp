#version 450
// Cosine and sine of the RoPE angle of every pair of dimensions at the tokens' positions (ROPE_ANGLES), once for all layers and heads.
//
//   binding 0  pos I32 [tokens]
//   binding 1  angles vec2 [tokens, ROPE_PAIRS]: (cos, sin)
//   binding 2  factors F32 [ROPE_PAIRS] (FACTORS): they divide the frequencies
//
// One thread per pair.
//
// Defines: WG_SIZE, FACTORS, PREVIOUS (1: of the position before each, as copy/previous.comp has it), ROPE_PAIRS, ROPE_FREQUENCIES
#define ROPE_MSCALE p.mscale
layout(local_size_x = WG_SIZE) in;

#ifndef PREVIOUS
#define PREVIOUS 0
#endif

layout(push_constant) uniform Push {
    uint count;    // tokens * ROPE_PAIRS
    float mscale;
} p;

#include "rope/rope.glsl"

layout(std430, set = 0, binding = 0) readonly buffer Pos { int pos[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Angles { vec2 angles[]; };
#if FACTORS
layout(std430, set = 0, binding = 2) readonly buffer Factors { float factors[]; };
#endif

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.count) return;
    const uint pair = i % ROPE_PAIRS;
    int position = pos[i / ROPE_PAIRS];
#if PREVIOUS
    position = max(position, 0) - 1;
#endif
#if FACTORS
    angles[i] = rope_angle(pair, position, factors[pair]);
#else
    angles[i] = rope_angle(pair, position);
#endif
}

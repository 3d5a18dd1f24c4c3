#version 450
// RoPE with everything that ggml's allows: pairs of neighbours or of halves, several positions per token of which each pair uses one (mrope),
// rotation from a given dimension on, frequency factors, forward and backward.
//
//   binding 0  x F32 [batches, tokens, heads, dim]
//   binding 1  pos I32 [positions, tokens]
//   binding 2  y F32, shape of x; may be x
//   binding 3  factors F32 [ROPE_PAIRS] (FACTORS 1)
//
// Pair i of a head rotates by the angle of position PAIR_POSITION[i] of its token; the angle depends on pair and token alone
// (rope/rope.glsl). One thread per pair, or per value that is not rotated.
//
// Defines: WG_SIZE; INTERLEAVED, 1: pair i is values 2i and 2i + 1, 0: i and i + ROPE_PAIRS, counted from value `first` on; PAIR_POSITION,
// comma-separated; FACTORS; ROPE_PAIRS, ROPE_FREQUENCIES
#define ROPE_MSCALE p.mscale
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint threads;
    uint dim;
    uint heads;
    uint tokens;
    uint first;
    float mscale;
    float direction;    // -1.0: backward
} p;

#include "rope/rope.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };
#if FACTORS
layout(std430, set = 0, binding = 3) readonly buffer InFactors { float factors[]; };
#endif

const uint pair_position[ROPE_PAIRS] = uint[](PAIR_POSITION);

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.threads) return;
    const uint each = p.dim - ROPE_PAIRS;    // threads per head
    const uint row = i / each, pair = i % each;
    if (pair >= ROPE_PAIRS) {
        const uint rest = pair - ROPE_PAIRS;
        const uint at = row * p.dim + (rest < p.first ? rest : rest + 2u * ROPE_PAIRS);
        y[at] = x[at];
        return;
    }
    const int position = pos[pair_position[pair] * p.tokens + row / p.heads % p.tokens];
#if FACTORS
    const vec2 angle = rope_angle(pair, position, factors[pair]);
#else
    const vec2 angle = rope_angle(pair, position);
#endif
    const uint a = row * p.dim + p.first + (INTERLEAVED == 1 ? 2u * pair : pair);
    const uint b = a + (INTERLEAVED == 1 ? 1u : ROPE_PAIRS);
    const float s = p.direction * angle.y, xa = x[a], xb = x[b];
    y[a] = xa * angle.x - xb * s;
    y[b] = xa * s + xb * angle.x;
}

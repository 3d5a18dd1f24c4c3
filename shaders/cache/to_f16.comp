#version 450
// The rows of a quantized cache that the tokens of a batch may see, as F16 (CACHE_TO_F16).
//
//   binding 0  cache [heads, n_ctx, head_dim] in the device layout (quant/weights.glsl)
//   binding 1  pos I32 [tokens]: consecutive from pos[0] on, padding behind
//   binding 2  y F16 [heads, n_ctx, head_dim], written as uvec4 (8 values): rows of the window before pos[0] .. pos[0] + tokens
//
// A thread decodes one unit of 32 values.
//
// Defines: QUANT_FILE
#include "quant/weights.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    Weights w;
    uint heads;
    uint n_ctx;
    uint tokens;
    uint window;    // 0: none
} p;
#include "quant/place.glsl"
#include QUANT_FILE

layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { uvec4 y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = i / p.w.units, unit = i - row * p.w.units;
    if (row >= p.heads * p.n_ctx) return;
    const uint at = row % p.n_ctx, first = uint(max(pos[0], 0));
    if (at >= first + p.tokens || (p.window > 0u && at + p.window < first + 1u)) return;
    vec4 v[8];
    unit_decode(unit_load(place(row, unit)), v);
    [[unroll]] for (uint j = 0u; j < 4u; j++)
        y[4u * i + j] = uvec4(packHalf2x16(v[2u * j].xy), packHalf2x16(v[2u * j].zw), packHalf2x16(v[2u * j + 1u].xy), packHalf2x16(v[2u * j + 1u].zw));
}

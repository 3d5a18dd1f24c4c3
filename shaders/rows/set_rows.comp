#version 450
// Rows of heads into a cache, as f16.
//
//   binding 0  x F32 [tokens, heads, head_dim]
//   binding 1  pos I32 [tokens]; a position outside 0..n_ctx-1 stores nothing
//   binding 2  cache F16 [heads, n_ctx, head_dim], two values a word
//
// A thread takes two neighbouring values.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint tokens;
    uint heads;
    uint half_dim;    // head_dim / 2
    uint n_ctx;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { vec2 x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Cache { uint cache[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = i / p.half_dim;
    const uint token = row / p.heads;
    if (token >= p.tokens) return;
    const int position = pos[token];
    if (position < 0 || uint(position) >= p.n_ctx) return;
    const uint head = row - token * p.heads;
    cache[(head * p.n_ctx + uint(position)) * p.half_dim + (i - row * p.half_dim)] = packHalf2x16(x[i]);
}

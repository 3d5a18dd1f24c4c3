#version 450
// SET_ROWS: stores rows of heads in a cache.
//
//   binding 0  x F32, or F16 if FROM_F16 is 1 [tokens, heads, head_dim]
//   binding 1  pos I32 [tokens]; a position outside 0 .. n_ctx - 1 stores nothing
//   binding 2  cache F16, or F32 if TO_F16 is 0 [heads, n_ctx, head_dim]
//
// One thread per two neighbouring values. Every workgroup waits for some of x.
#include "common/clock.glsl"
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint tokens;
    uint heads;
    uint half_dim;    // head_dim / 2
    uint n_ctx;
} p;

#if FROM_F16
layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
#define LOAD(v, i) v = unpackHalf2x16(x[i]);
#else
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InX { vec2 x[]; };
#define LOAD(v, i) SPIN_UNTIL(v = x[i], arrived(v))
#endif
layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
#if TO_F16
layout(std430, set = 0, binding = 2) writeonly buffer Cache { uint cache[]; };
#if FROM_F16
#define STORED(v) packHalf2x16(v)
#else
#include "cache/f16_bits.glsl"
#define STORED(v) f16_bits_of(v)
#endif
#else
layout(std430, set = 0, binding = 2) writeonly buffer Cache { vec2 cache[]; };
#define STORED(v) v
#endif

void main() {
    MARK(MARK_BEGIN);
    const uint index = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint values = p.tokens * p.heads * p.half_dim, i = min(index, values - 1u);
    vec2 v;
    LOAD(v, i)
    MARK(MARK_INPUTS);
    MARK(MARK_DONE);
    const uint row = i / p.half_dim;
    const uint token = row / p.heads;
    const int position = pos[token];
    const uint head = row - token * p.heads;
    if (index < values && position >= 0 && uint(position) < p.n_ctx)
        cache[(head * p.n_ctx + uint(position)) * p.half_dim + (i - row * p.half_dim)] = STORED(v);
    arrive();
    MARK(MARK_END);
}

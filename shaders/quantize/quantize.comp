#version 450
// Quantizes F32 rows to Q8_1 (common/q8_1.glsl).
//
//   binding 0  x F32 [rows, k]
//   binding 1  y Q8_1 [rows, k], padded with zeros to a multiple of 32
//
// Eight threads per unit, four values each, counted over all rows.
//
// Defines: WIDTH 4: k is a multiple of 4; 1: any k
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"
#include "common/clock.glsl"
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint k;
    uint units;    // units of a row
} p;

#if WIDTH == 4
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InX { vec4 x[]; };
#else
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InX { float x[]; };
#endif
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"

void main() {
    MARK(MARK_BEGIN);
    const uint index = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = index / (8u * p.units);
    const uint quad = index - row * 8u * p.units;
    const bool valid = row < p.rows;
    vec4 v = vec4(0.0);
#if WIDTH == 4
    if (valid && 4u * quad < p.k) SPIN_UNTIL(v = x[row * (p.k / 4u) + quad], arrived(v))
#else
    for (uint c = 0u; c < 4u; c++)
        if (valid && 4u * quad + c < p.k) SPIN_UNTIL(v[c] = x[row * p.k + 4u * quad + c], arrived(v[c]))
#endif
    MARK(MARK_INPUTS);
    const Q8_1Quad packed = q8_1_pack(quad, v);
    MARK(MARK_DONE);
    if (valid) q8_1_store(row, p.units, quad, packed);
    MARK(MARK_END);
}

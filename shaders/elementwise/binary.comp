#version 450
// y = a OPERATOR b, with b broadcast along leading and trailing axes.
//
//   binding 0  a F32
//   binding 1  b F32: value i of a goes with value (i / b_inner) % b_count of b
//   binding 2  y F32, shape of a
//
// One thread per element, of WIDTH values.
//
// Defines:
//   OPERATOR  + - * /
//   WIDTH     4: a and y as vec4; 1: as float
//   B_WIDTH   4: b as vec4, b_inner and b_count count vec4; 1: one value of b for a whole element
//   those of common/sentinel.glsl and common/arrivals.glsl
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;
#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint elements;    // of a
    uint b_inner;     // elements of a that share an element of b
    uint b_count;     // elements of b
} p;

#if WIDTH == 4
#define ELEMENT vec4
#else
#define ELEMENT float
#endif
#if B_WIDTH == 4
#define B_ELEMENT vec4
#else
#define B_ELEMENT float
#endif
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InA { ELEMENT a[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InB { B_ELEMENT b[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { ELEMENT y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i < p.elements) {
        const uint at = (i / p.b_inner) % p.b_count;
        B_ELEMENT other;
#if SPINS_ON_PARTS
        SPIN_UNTIL(other = b[at], arrived(other));
#else
        other = b[at];
#endif
        ELEMENT v;
        SPIN_UNTIL(v = a[i], arrived(v));
        y[i] = not_sentinel(v OPERATOR other);
    }
    arrive();
}

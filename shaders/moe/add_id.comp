#version 450
// ADD_ID: adds each expert's bias to its output. y[t, e, i] = a[t, e, i] + b[ids[t, e] * m + i].
//
//   binding 0  a    F32 [slots, m], as vectors of WIDTH; a slot is one chosen expert of one token
//   binding 1  b    F32 [n_expert * m], likewise: the biases of all experts end to end
//   binding 2  ids  I32 [slots]
//   binding 3  y    F32, shape of a
//
// One thread per WIDTH neighbouring values.
//
// Defines: WG_SIZE, WIDTH (4: m is a multiple of 4; else 1)

#if WIDTH == 4
#define Wide vec4
#else
#define Wide float
#endif

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;  // slots * parts
    uint parts;     // m / WIDTH
} p;

layout(binding = 0) readonly buffer A { Wide a[]; };
layout(binding = 1) readonly buffer B { Wide b[]; };
layout(binding = 2) readonly buffer Ids { int ids[]; };
layout(binding = 3) writeonly buffer Y { Wide y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    y[i] = a[i] + b[uint(ids[i / p.parts]) * p.parts + i % p.parts];
}

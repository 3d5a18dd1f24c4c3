#version 450
// Rows of an activation.
//
//   binding 0  x F32 [rows, k]
//   binding 1  ids I32 [n]; an id outside the table gives zeros
//   binding 2  y F32 [n, k]
//
// A thread takes one element: WIDTH values.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint elements;    // of a row
    uint rows;
} p;

#if WIDTH == 4
#define ELEMENT vec4
#else
#define ELEMENT float
#endif
layout(std430, set = 0, binding = 0) readonly buffer InX { ELEMENT x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InIds { int ids[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { ELEMENT y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint token = i / p.elements;
    if (token >= p.n) return;
    const uint id = uint(ids[token]);
    y[i] = id < p.rows ? x[id * p.elements + (i - token * p.elements)] : ELEMENT(0.0);
}

#version 450
// GET_ROWS of a table that is not quantized.
//
//   binding 0  x [rows, k], 32-bit values, or F16 (two to a word) if FROM_F16 is 1
//   binding 1  ids I32 [n]; an id outside the table gives zeros
//   binding 2  y [n, k], 32-bit values: F16 becomes F32
//
// One thread per element, of WIDTH (4 or 1) values.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint elements;    // elements of a row
    uint rows;
} p;

#if WIDTH == 4
#define ELEMENT uvec4
#else
#define ELEMENT uint
#endif
#if !FROM_F16
layout(std430, set = 0, binding = 0) readonly buffer InX { ELEMENT x[]; };
#define LOAD(i) x[i]
#elif WIDTH == 4
layout(std430, set = 0, binding = 0) readonly buffer InX { uvec2 x[]; };
#define LOAD(i) floatBitsToUint(vec4(unpackHalf2x16(x[i].x), unpackHalf2x16(x[i].y)))
#else
layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
#define LOAD(i) floatBitsToUint(unpackHalf2x16(x[(i) >> 1] >> (16u * ((i) & 1u))).x)
#endif
layout(std430, set = 0, binding = 1) readonly buffer InIds { int ids[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { ELEMENT y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint token = i / p.elements;
    if (token >= p.n) return;
    const uint id = uint(ids[token]);
    ELEMENT v = ELEMENT(0u);
    if (id < p.rows) v = LOAD(id * p.elements + (i - token * p.elements));
    y[i] = v;
}

#version 450
// Ids for a batched product done as MUL_MAT_ID: which matrix each slice takes.
//
//   binding 0  y I32 [outer, inner, n]: (o / outer_repeat) * matrices + i / inner_repeat, in all n places of slice (o, i)
//
// One thread per value.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint count;  // outer * inner * n
    uint n;
    uint inner;
    uint inner_repeat;
    uint outer_repeat;
    uint matrices;  // along the inner axis: inner / inner_repeat
} p;

layout(std430, set = 0, binding = 0) writeonly buffer OutY { int y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.count) return;
    const uint slice = i / p.n;
    y[i] = int((slice / p.inner / p.outer_repeat) * p.matrices + slice % p.inner / p.inner_repeat);
}

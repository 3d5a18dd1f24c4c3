#version 450
// delta = dy . y for each row of attention's output, a term that all derivatives of the row's scores share.
//
//   binding 0  dy F32 [rows, dim]
//   binding 1  y F32 [rows, dim]
//   binding 2  delta F32 [rows]
//
// One thread per row.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InY { float y[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutDelta { float delta[]; };

void main() {
    const uint row = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (row >= p.rows) return;
    float sum = 0.0;
    for (uint i = row * p.dim; i < (row + 1u) * p.dim; i++) sum += dy[i] * y[i];
    delta[row] = sum;
}

#version 450
// Row ids of each matrix of a batch as ids into all rows of the table.
//
//   binding 0  ids I32: number i of matrix (o, j) lies at offset + o * stride.x + j * stride.y + i * stride.z
//   binding 1  y I32 [outer, inner, n]: first + (o * inner + j) * table_rows + id; an id outside of the matrix becomes -1
//
// A thread writes one number.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint outer;
    uint inner;
    uint n;
    uint offset;
    uint stride[3];
    uint first;
    uint rows;        // of a matrix
    uint table_rows;  // that it takes in the table
} p;

layout(std430, set = 0, binding = 0) readonly buffer InIds { int ids[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { int y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint matrix = i / p.n;
    if (matrix >= p.outer * p.inner) return;
    const uint id = uint(ids[p.offset + (matrix / p.inner) * p.stride[0] + (matrix % p.inner) * p.stride[1] + (i % p.n) * p.stride[2]]);
    y[i] = id < p.rows ? int(p.first + matrix * p.table_rows + id) : -1;
}

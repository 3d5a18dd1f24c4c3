#version 450
// Turns the row ids of each matrix of a batch into ids into all rows of the table.
//
//   binding 0  ids I32: id i of matrix (o, j) is at offset + o * stride[0] + j * stride[1] + i * stride[2]
//   binding 1  y I32 [outer, inner, n]: first + (o * inner + j) * table_rows + id; an id outside the matrix becomes -1
//
// One thread per id.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint outer;
    uint inner;
    uint n;
    uint offset;
    uint stride[3];
    uint first;
    uint rows;        // rows of a matrix
    uint table_rows;  // rows that a matrix takes up in the table
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

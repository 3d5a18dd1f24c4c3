#version 450
// Sums of columns: y[o, b, j] = sum of x[o, i, j] over the rows i of block b. Blocks are added up by a second launch, whose rows they are.
//
//   binding 0  x F32 [outer, rows, columns]
//   binding 1  y F32 [outer, blocks, columns]
//
// A thread takes a column of a block, one row after the other. Workgroups: columns along x, blocks along y, outer along z.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint columns;
    uint block;    // rows of one
    uint blocks;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint column = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (column >= p.columns) return;
    const uint first = gl_WorkGroupID.y * p.block, end = min(first + p.block, p.rows);
    float sum = 0.0;
    for (uint row = first; row < end; row++) sum += x[(gl_WorkGroupID.z * p.rows + row) * p.columns + column];
    y[(gl_WorkGroupID.z * p.blocks + gl_WorkGroupID.y) * p.columns + column] = sum;
}

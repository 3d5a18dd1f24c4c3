#version 450
// Sums of columns: y[o, b, j] = sum of x[o, i, j] over the rows i of block b. A second launch adds up the blocks: they are its rows.
//
//   binding 0  x F32 [outer, rows, columns]
//   binding 1  y F32 [outer, blocks, columns]
//
// One thread per column of a block; it walks the rows in order. Grid: columns, blocks, outer.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint columns;
    uint block;    // rows per block
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

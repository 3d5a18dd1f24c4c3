#version 450
// Sums over rows, in blocks of rows: y[o, b, j] = sum of x[o, i, j] over the rows i of block b. Where there is more than one block, a second
// launch takes the blocks as its rows and adds them.
//
//   binding 0  x F32 [outer, rows, columns]
//   binding 1  y F32 [outer, blocks, columns]
//
// A thread sums one column of one block, in the order of its rows. A workgroup takes WG_SIZE neighbouring columns of a block. Workgroups are
// numbered gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x: first along the columns, then the blocks, then the outer index.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint columns;
    uint block;    // rows per block; the last block may have fewer
    uint blocks;
    uint outer;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint groups_per_block = (p.columns + WG_SIZE - 1u) / WG_SIZE;
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint column = group % groups_per_block * WG_SIZE + gl_LocalInvocationID.x;
    const uint out_block = group / groups_per_block;  // o * blocks + b
    if (column >= p.columns || out_block >= p.outer * p.blocks) return;
    const uint o = out_block / p.blocks, first = out_block % p.blocks * p.block, end = min(first + p.block, p.rows);
    float sum = 0.0;
    for (uint row = first; row < end; row++) sum += x[(o * p.rows + row) * p.columns + column];
    y[out_block * p.columns + column] = sum;
}

#version 450
// Sums of columns: y[o, b, j] = sum of x[o, i, j] over the rows i of block b. A second launch adds up the blocks: they are its rows.
//
//   binding 0  x F32 [outer, rows, columns]
//   binding 1  y F32 [outer, blocks, columns]
//
// One thread per column of a block; it walks the rows in order. Workgroup y * gl_NumWorkGroups.x + x computes WG_SIZE columns of a block;
// the workgroups of a block follow each other, and so do the blocks of an o.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint columns;
    uint block;    // rows per block
    uint blocks;
    uint outer;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    const uint parts = (p.columns + WG_SIZE - 1u) / WG_SIZE, group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint column = group % parts * WG_SIZE + gl_LocalInvocationID.x, made = group / parts;  // made: of outer times blocks
    if (column >= p.columns || made >= p.outer * p.blocks) return;
    const uint o = made / p.blocks, first = made % p.blocks * p.block, end = min(first + p.block, p.rows);
    float sum = 0.0;
    for (uint row = first; row < end; row++) sum += x[(o * p.rows + row) * p.columns + column];
    y[made * p.columns + column] = sum;
}

#version 450
// ARGSORT and TOP_K of rows: the indices that sort each row, or the first `kept` of them. Of equal values the lower index comes first.
//
//   binding 0  x F32 [rows, dim]
//   binding 1  y I32 [rows, kept]: index of the smallest value first or, with DESCENDING 1, of the largest
//
// A thread counts the rank of one value by comparing it with all others of its row: dim^2 comparisons, but no barrier and no shared memory.
// Workgroup (x, y, z): values x * WG_SIZE .., row y + z * (size of the grid along y).
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    uint kept;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { int y[]; };

void main() {
    const uint row = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    const uint i = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (row >= p.rows || i >= p.dim) return;
    const float mine = x[row * p.dim + i];
    uint rank = 0u;
    for (uint j = 0u; j < p.dim; j++) {
        const float other = x[row * p.dim + j];
#if DESCENDING
        const bool before = other > mine;
#else
        const bool before = other < mine;
#endif
        rank += uint(before || (other == mine && j < i));
    }
    if (rank < p.kept) y[row * p.kept + rank] = int(i);
}

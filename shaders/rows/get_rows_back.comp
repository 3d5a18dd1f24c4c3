#version 450
// Gradient of GET_ROWS with respect to its table: row ids[t] gets the sum of the rows of dy of all tokens with that id, in order, times scale.
// Other rows are not written, so the table must be filled with zeros before.
//
//   binding 0  dy F32 [n, k]
//   binding 1  ids I32 [n]; ids outside the table are skipped
//   binding 2  table F32 [rows, k]
//
// Workgroup (x, y) sums for the id of token y, unless an earlier token has the same id.
// One thread per column, WG_SIZE columns from x * WG_SIZE on.
//
// Defines: those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint k;
    uint rows;
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InIds { int ids[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutTable { float table[]; };

void main() {
    const uint token = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    if (token >= p.n) return;
    const uint id = uint(ids[token]);
    if (id >= p.rows) return;
    uint before = 0u;
    for (uint i = gl_LocalInvocationID.x; i < token; i += WG_SIZE) before = max(before, uint(uint(ids[i]) == id));
    if (wg_max(before) != 0u) return;
    const uint column = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (column >= p.k) return;
    float sum = 0.0;
    for (uint t = token; t < p.n; t++) if (uint(ids[t]) == id) sum += dy[t * p.k + column];
    table[id * p.k + column] = p.scale * sum;
}

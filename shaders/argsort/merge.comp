#version 450
// One pass of a merge sort of rows: merges pairs of sorted runs of `run` indices. For rows too long to count ranks (argsort/argsort.comp).
//
//   binding 0  x F32 [rows, dim]
//   binding 1  from: indices into the row, I32 [rows, dim], in sorted runs. Not read if FIRST is 1: then index i is at place i
//   binding 2  to: likewise, merged, I32 [rows, keep]; places from `keep` on are dropped
//
// A thread takes one index. Its place in the merged run is its place in its own run plus the number of values of the other run that come before
// it, found by binary search. Of equal values the lower index comes first, which is the one in the lower run.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    uint run;
    uint keep;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InFrom { uint from[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutTo { uint to[]; };

uint index_at(uint row, uint place) {
#if FIRST
    return place;
#else
    return from[row * p.dim + place];
#endif
}

void main() {
    const uint place = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y;
    if (row >= p.rows || place >= p.dim) return;
    const uint number = place / p.run;
    const bool upper = number % 2u == 1u;
    const uint other = (upper ? number - 1u : number + 1u) * p.run;
    const uint index = index_at(row, place);
    const float own_value = x[row * p.dim + index];
    uint low = min(other, p.dim);
    uint high = min(other + p.run, p.dim);
    const uint first = low;
    while (low < high) {
        const uint middle = (low + high) / 2u;
        const float other_value = x[row * p.dim + index_at(row, middle)];
#if DESCENDING
        const bool before = upper ? other_value >= own_value : other_value > own_value;
#else
        const bool before = upper ? other_value <= own_value : other_value < own_value;
#endif
        if (before) low = middle + 1u;
        else high = middle;
    }
    const uint at = number / 2u * 2u * p.run + place % p.run + (low - first);
    if (at < p.keep) to[row * p.keep + at] = index;
}

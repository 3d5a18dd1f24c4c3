#version 450
// WRITE_WORDS: single words of a buffer, by pairs of where and what.
//
//   binding 0  edits   I32 [pairs, 2]: index of a word, its new value. An index that is negative or behind the end writes nothing
//   binding 1  target  I32 [words]
//
// One thread per pair. Indices are distinct.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint pairs;
    uint words;
} p;

layout(std430, binding = 0) readonly buffer Edits { int edits[]; };
layout(std430, binding = 1) writeonly buffer Target { int target[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.pairs) return;
    const uint index = uint(edits[2 * i]);
    if (index < p.words) target[index] = edits[2 * i + 1];
}

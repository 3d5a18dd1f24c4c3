#version 450
// COPY_PAGES: whole pages from one KV cache to another, or within one.
//
//   binding 0  which I32 [m, 2]: (page to read, page to write); a pair with a negative number copies nothing
//   binding 1  source: a cache of `heads` heads, rows one after the other (a plane of it, where it is quantized)
//   binding 2  target, the same with another number of rows
//
// A page of a head is `page_words` 16-byte words in a row. One thread a word.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint count;           // pages * heads * page_words
    uint heads;
    uint page_words;
    uint source_first;    // 16-byte words before the plane
    uint source_head;     // from head to head
    uint target_first;
    uint target_head;
} p;

layout(std430, set = 0, binding = 0) readonly buffer Which { ivec2 which[]; };
layout(std430, set = 0, binding = 1) readonly buffer Source { uvec4 source[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Target { uvec4 target[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.count) return;
    const uint word = i % p.page_words, head = i / p.page_words % p.heads;
    const ivec2 pages = which[i / (p.page_words * p.heads)];
    if (pages.x < 0 || pages.y < 0) return;
    target[p.target_first + head * p.target_head + uint(pages.y) * p.page_words + word] =
        source[p.source_first + head * p.source_head + uint(pages.x) * p.page_words + word];
}

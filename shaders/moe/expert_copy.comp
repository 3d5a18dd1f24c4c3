#version 450
// EXPERT_COPY: copies experts into the slots of a cache, plane by plane (docs/weight_layout.md).
//
//   binding 0  w       experts, as the device stores them; it may lie in memory of the host
//   binding 1  moves   I32 [.., 2]    (expert, slot) of each copy; -1: none
//   binding 2  cached  slots, each as large as an expert, in place
//
// gl_WorkGroupID.y is the number of a copy. A thread takes EACH words of an expert, all of which it reads before it stores the first: over PCIe
// many reads must be in flight.
//
// Defines: WG_SIZE, EACH, WIDTH (bytes of a word: 16, or 4 where planes are no multiples of 16), PLANES
layout(local_size_x = WG_SIZE) in;

#if WIDTH == 16
#define Word uvec4
#else
#define Word uint
#endif

layout(push_constant) uniform Push {
    uint words;         // of an expert, in all planes
    uint from[PLANES];  // words of w before each plane
    uint to[PLANES];    // of cached
    uint size[PLANES];  // of a plane of one expert
} p;

layout(std430, set = 0, binding = 0) readonly buffer Experts { Word w[]; };
layout(std430, set = 0, binding = 1) readonly buffer Moves { ivec2 moves[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Cached { Word cached[]; };

void main() {
    const ivec2 move = moves[gl_WorkGroupID.y];
    if (move.x < 0) return;
    const uint begin = gl_WorkGroupID.x * WG_SIZE * EACH + gl_LocalInvocationID.x;
    Word held[EACH];
    uint target[EACH];
    for (uint i = 0u; i < EACH; i++) {
        uint at = begin + i * WG_SIZE;
        target[i] = 0xffffffffu;
        if (at >= p.words) continue;
        uint plane = 0u;
        while (plane + 1u < PLANES && at >= p.size[plane]) at -= p.size[plane++];
        held[i] = w[p.from[plane] + uint(move.x) * p.size[plane] + at];
        target[i] = p.to[plane] + uint(move.y) * p.size[plane] + at;
    }
    for (uint i = 0u; i < EACH; i++) {
        if (target[i] != 0xffffffffu) cached[target[i]] = held[i];
    }
}

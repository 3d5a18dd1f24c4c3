#version 450
// The route (gemm/route.comp) of a product by heads. Slot t * heads + h is head h of token t,
// so every slot's position is known without sorting.
//
//   binding 0  route uint, laid out as by route.comp: tiles x (head, first, count, 0), then the slots, sorted by head
//
// Thread i writes tile i and place i.
//
// Defines: WG
layout(local_size_x = WG) in;

layout(push_constant) uniform Push {
    uint tokens;
    uint heads;
    uint tile_n;  // columns per tile
    uint tiles;   // room for so many
} p;

layout(std430, set = 0, binding = 0) writeonly buffer Route { uint route[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG + gl_LocalInvocationID.x;
    const uint of_head = (p.tokens + p.tile_n - 1u) / p.tile_n;
    if (i < p.tiles) {
        const uint head = i / of_head, first = i % of_head * p.tile_n;
        const bool spare = head >= p.heads;
        route[4u * i] = spare ? 0u : head;
        route[4u * i + 1u] = spare ? 0u : head * p.tokens + first;
        route[4u * i + 2u] = spare ? 0u : min(p.tile_n, p.tokens - first);
        route[4u * i + 3u] = 0u;
    }
    if (i < p.tokens * p.heads) route[4u * p.tiles + i] = i % p.tokens * p.heads + i / p.tokens;
}

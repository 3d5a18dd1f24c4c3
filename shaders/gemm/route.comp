#version 450
// The route of a grouped product (MUL_MAT_ID): sorts its columns, which are slots (one chosen expert of one token each), by expert, and cuts
// them into tiles of at most TILE_N columns, none of which mixes two experts.
//
//   binding 0  ids I32 [slots]: the expert of each slot
//   binding 1  route uint: TILES x (expert, first, count, 0), then [slots] the sorted slots. Tile t has `count` columns: the sorted slots from
//              place `first` on. Spare tiles have count 0
//
// One workgroup does a counting sort: it counts the slots of every expert and forms running sums; thread e writes the tiles of expert e; then
// each thread puts its slots into the ranges of their experts. The order within an expert varies, but no result depends on it:
// each column has its own sums.
//
// Defines: WG, EXPERTS, TILE_N
layout(local_size_x = WG) in;

layout(push_constant) uniform Push {
    uint slots;
    uint tiles;   // room for so many
} p;

layout(std430, set = 0, binding = 0) readonly buffer Ids { int ids[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Route { uint route[]; };

shared uint place[EXPERTS];       // slots of each expert; later, where its next slot goes
shared uint ends[2][EXPERTS];     // running sums of slots, of tiles

uint tiles_of(uint count) { return (count + TILE_N - 1u) / TILE_N; }

void main() {
    const uint tid = gl_LocalInvocationID.x;
    for (uint e = tid; e < EXPERTS; e += WG) place[e] = 0u;
    barrier();
    for (uint s = tid; s < p.slots; s += WG) atomicAdd(place[min(uint(ids[s]), EXPERTS - 1u)], 1u);
    barrier();
    if (tid == 0u) {
        uint slots = 0u, tiles = 0u;
        for (uint e = 0u; e < EXPERTS; e++) {
            slots += place[e];
            tiles += tiles_of(place[e]);
            ends[0][e] = slots;
            ends[1][e] = tiles;
        }
    }
    barrier();
    for (uint e = tid; e < EXPERTS; e += WG) {
        const uint count = place[e], first = ends[0][e] - count, first_tile = ends[1][e] - tiles_of(count);
        for (uint t = 0u; t < tiles_of(count); t++) {
            route[4u * (first_tile + t)] = e;
            route[4u * (first_tile + t) + 1u] = first + t * TILE_N;
            route[4u * (first_tile + t) + 2u] = min(TILE_N, count - t * TILE_N);
            route[4u * (first_tile + t) + 3u] = 0u;
        }
        place[e] = first;
    }
    for (uint t = ends[1][EXPERTS - 1] + tid; t < p.tiles; t += WG)
        for (uint i = 0u; i < 4u; i++) route[4u * t + i] = 0u;
    barrier();
    for (uint s = tid; s < p.slots; s += WG) route[4u * p.tiles + atomicAdd(place[min(uint(ids[s]), EXPERTS - 1u)], 1u)] = s;
}

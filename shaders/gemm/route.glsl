// The route of a grouped product (MUL_MAT_ID) by one workgroup, which sorts slots (one chosen expert of one token each) by expert, and cuts them
// into tiles of at most TILE_N columns, none of which mixes two experts.
//
//   route uint: TILES x (expert, first, count, 0), then [slots] the sorted slots. Tile t has `count` columns: the sorted slots from place
//   `first` on. Spare tiles have count 0
//
// A counting sort: it counts the slots of every expert and forms running sums; thread e writes the tiles of expert e; then each thread puts its
// slots into the ranges of their experts. The order within an expert varies, but no result depends on it: each column has its own sums.
//
// The includer has ROUTE_ID(s), the expert of a slot, and a buffer `uint route[]`. Defines: ROUTE_THREADS EXPERTS TILE_N
shared uint route_place[EXPERTS];    // slots of each expert; later, where its next slot goes
shared uvec2 route_ends[2][EXPERTS];  // running sums of slots and of tiles, the last ones and the next

uint tiles_of(uint count) { return (count + TILE_N - 1u) / TILE_N; }

uint expert_of(uint slot) { return min(uint(ROUTE_ID(slot)), EXPERTS - 1u); }

// tiles: room for so many.
void make_route(uint tid, uint slots, uint tiles) {
    for (uint e = tid; e < EXPERTS; e += ROUTE_THREADS) route_place[e] = 0u;
    barrier();
    for (uint s = tid; s < slots; s += ROUTE_THREADS) atomicAdd(route_place[expert_of(s)], 1u);
    barrier();
    for (uint e = tid; e < EXPERTS; e += ROUTE_THREADS) route_ends[0][e] = uvec2(route_place[e], tiles_of(route_place[e]));
    barrier();
    uint last = 0u;
    for (uint step = 1u; step < EXPERTS; step *= 2u) {
        for (uint e = tid; e < EXPERTS; e += ROUTE_THREADS)
            route_ends[1u - last][e] = route_ends[last][e] + (e >= step ? route_ends[last][e - step] : uvec2(0u));
        last = 1u - last;
        barrier();
    }
    for (uint e = tid; e < EXPERTS; e += ROUTE_THREADS) {
        const uint count = route_place[e], first = route_ends[last][e].x - count, first_tile = route_ends[last][e].y - tiles_of(count);
        for (uint t = 0u; t < tiles_of(count); t++) {
            route[4u * (first_tile + t)] = e;
            route[4u * (first_tile + t) + 1u] = first + t * TILE_N;
            route[4u * (first_tile + t) + 2u] = min(TILE_N, count - t * TILE_N);
            route[4u * (first_tile + t) + 3u] = 0u;
        }
        route_place[e] = first;
    }
    for (uint t = route_ends[last][EXPERTS - 1].y + tid; t < tiles; t += ROUTE_THREADS)
        for (uint i = 0u; i < 4u; i++) route[4u * t + i] = 0u;
    barrier();
    for (uint s = tid; s < slots; s += ROUTE_THREADS) route[4u * tiles + atomicAdd(route_place[expert_of(s)], 1u)] = s;
}

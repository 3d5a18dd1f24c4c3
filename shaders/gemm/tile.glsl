// Which tile of the product a workgroup makes. Needs gemm/iface.glsl, GROUPED (0 or 1, a constant), TILE_M and TILE_N.
//
// Workgroups count through the column tiles of a row tile first:
// workgroups that run at the same time then read the same weights, from the cache.

layout(std430, set = 0, binding = 5) readonly buffer Route { uint route[]; };

// A 0 that the compiler cannot know before the route has arrived, where a kernel waits for it.
#ifndef ROUTE_ZERO
#define ROUTE_ZERO 0u
#endif

uint tile_row;     // first weight row of the tile, within its matrix
uint tile_matrix;  // first row of this expert
uint tile_column;  // first column of the tile; grouped: position in the sorted slots
uint tile_count;   // columns in this tile
uint tile_number;  // number of the column tile
uint first_unit;   // the units that this workgroup sums over (split-K)
uint end_unit;

// False if there is nothing to do: the grid may be larger than the product.
bool find_tile() {
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    tile_number = group % p.tiles_n;
    tile_row = group / p.tiles_n * TILE_M;
    first_unit = gl_WorkGroupID.z * p.split_units;
    end_unit = min(first_unit + p.split_units, p.w.units);
    if (GROUPED != 0) {
        tile_matrix = route[4u * tile_number + ROUTE_ZERO] * p.m;
        tile_column = route[4u * tile_number + 1u + ROUTE_ZERO];
        tile_count = route[4u * tile_number + 2u + ROUTE_ZERO];
    } else {
        tile_matrix = 0u;
        tile_column = tile_number * TILE_N;
        tile_count = min(TILE_N, p.n - min(tile_column, p.n));
    }
    return tile_row < p.m && tile_count > 0u;
}

// The token or slot of column c of the tile: its row of y and of the residual.
uint column_of(uint c) {
    return GROUPED != 0 ? route[4u * p.tiles_n + tile_column + c + ROUTE_ZERO] : tile_column + c;
}

// The row of x of that token or slot.
uint x_row_of(uint column) {
    return GROUPED != 0 ? column / p.x_shared : column;
}

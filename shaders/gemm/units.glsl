// Unit order: the layout of activations for gemm/coop_reg.comp.
// f16 in K order (gemm/matrix.glsl), for matrices whose rows ROW_LANES lanes share.
//
// A block is ROW_LANES units of 32 values along K. Lane t of a row decodes one unit of a block by itself, and uses its value v as element
// v % LANE_VALUES of matrix v / LANE_VALUES. (The matrices thus see K in another order, the same for weights and activations.)
// Which unit: if the number of blocks is even, those of lane t in blocks 2 i and 2 i + 1 are neighbours, units 2 ROW_LANES i + 2 t and the one
// after it. Its lanes then ask for whole cache lines of weights at a time. Otherwise lane t takes unit t of each block.
// So a lane of matrix B needs, per block, 32 values of each of its columns:
//
//   [columns / FN][blocks][words of a lane per block][SG] 16-byte words. A lane's eight values per word, in the order of the elements of its
//   matrices, are [32 / LANE_VALUES matrices][OWN_COLUMNS columns][LANE_VALUES]
//
// Needs SG, FN, FK and ROW_LANES.
const uint ROW_GROUPS = SG / ROW_LANES;    // groups of lanes that share rows
const uint LANE_VALUES = FK / ROW_LANES;   // values of a row that a lane holds of a matrix
const uint OWN_COLUMNS = FN / ROW_GROUPS;  // columns of which a lane holds elements
const uint BLOCK_WORDS = 4 * OWN_COLUMNS;  // words of a lane per block

bool paired_blocks(uint blocks) { return blocks % 2u == 0u; }

// The unit that a row's lane `lane` decodes in a block, the counterpart of unit_place.
uint unit_of(uint block, uint lane, uint blocks) {
    return paired_blocks(blocks) ? block / 2u * (2u * ROW_LANES) + 2u * lane + block % 2u : block * ROW_LANES + lane;
}

// Index of the f16 value at position k (in K order) of a column. stride: 16-byte words of a column of matrices.
uint unit_place(uint column, uint k, uint stride) {
    const bool paired = paired_blocks(stride / (BLOCK_WORDS * SG));
    const uint unit = k / 32u, v = k % 32u;
    const uint block = paired ? unit / (2u * ROW_LANES) * 2u + unit % 2u : unit / ROW_LANES;
    const uint lane = column % ROW_GROUPS * ROW_LANES + (paired ? unit / 2u : unit) % ROW_LANES;
    const uint number = v / LANE_VALUES * (OWN_COLUMNS * LANE_VALUES) + column % FN / ROW_GROUPS * LANE_VALUES + v % LANE_VALUES;
    return 8u * (column / FN * stride + (block * BLOCK_WORDS + number / 8u) * SG + lane) + number % 8u;
}

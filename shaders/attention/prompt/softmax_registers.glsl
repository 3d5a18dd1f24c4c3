// Online softmax of attention/prompt/prompt_matrix.comp in registers. Used if the check at start-up (gemm/fragment_map.comp) found that ROW_LANES
// neighbouring lanes share a row of a sum matrix, and that a matrix A has its elements in the same places as a sum matrix.
// Needs first_row_of(m).

const uint OWN_ROWS = ROW_LANES != 0 ? FM * ROW_LANES / SG : 1;  // rows of a matrix of which a lane holds elements; its elements lie row by row
const uint ROW_ELEMENTS = ELEMENTS / OWN_ROWS;                  // elements of each row

float own_max[MQ * OWN_ROWS], own_sum[MQ * OWN_ROWS];  // own_sum: of weights, over this lane's columns only

uint own_row(uint r) { return gl_SubgroupInvocationID / max(ROW_LANES, 1) + r * (FM / OWN_ROWS); }

float max_over_row(float v) {
    [[unroll]] for (uint offset = 1; offset < ROW_LANES; offset *= 2) v = max(v, subgroupShuffleXor(v, offset));
    return v;
}

float sum_over_row(float v) {
    [[unroll]] for (uint offset = 1; offset < ROW_LANES; offset *= 2) v += subgroupShuffleXor(v, offset);
    return v;
}

// Turns a block's scores into weights, as matrices A, and rescales the sums so far.
void softmax_in_registers(uint m, inout MATRIX_SUM score[NS], out MATRIX_A p_matrix[NP]) {
    MATRIX_SUM factors;
    [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
        float highest = score[0][r * ROW_ELEMENTS];
        [[unroll]] for (uint s = 0; s < NS; s++)
            [[unroll]] for (uint e = 0; e < ROW_ELEMENTS; e++) highest = max(highest, score[s][r * ROW_ELEMENTS + e]);
        const uint at = m * OWN_ROWS + r;
        const float old_max = own_max[at], new_max = max(old_max, max_over_row(highest));
        const float finite_max = max(new_max, LOWEST), rescale = exp2(old_max - new_max);
        own_max[at] = new_max;
        float weight_sum = own_sum[at] * rescale;
        [[unroll]] for (uint s = 0; s < NS; s++)
            [[unroll]] for (uint e = 0; e < ROW_ELEMENTS; e++) {
                const float weight = exp2(score[s][r * ROW_ELEMENTS + e] - finite_max);
                weight_sum += weight;
                p_matrix[min(s, NP - 1)][r * ROW_ELEMENTS + e] = float16_t(weight);
            }
        own_sum[at] = weight_sum;
        [[unroll]] for (uint e = 0; e < ROW_ELEMENTS; e++) factors[r * ROW_ELEMENTS + e] = rescale;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
}

// Normalizes the sums of matrix row m.
void normalize_in_registers(uint m, uint query0) {
    MATRIX_SUM factors;
    [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
        const uint at = m * OWN_ROWS + r, query = query0 + first_row_of(m) + own_row(r);
        const float rescale = normalizer(query, own_max[at], sum_over_row(own_sum[at]));
        [[unroll]] for (uint e = 0; e < ROW_ELEMENTS; e++) factors[r * ROW_ELEMENTS + e] = rescale;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
}

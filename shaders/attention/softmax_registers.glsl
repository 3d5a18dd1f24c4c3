// Online softmax of attention/prompt_matrix.comp in registers. Used if the check at start-up (mat_mul/fragment_map.comp) found that ROW_LANES
// neighbouring lanes share a row of a sum matrix, and that a matrix A has its elements in the same places as a sum matrix.
// Needs first_row_of(m).

const uint OWN_ROWS = ROW_LANES != 0 ? FM * ROW_LANES / SG : 1;  // rows of a matrix of which a lane holds elements; its elements lie row by row
const uint EACH = ELEMENTS / OWN_ROWS;                          // elements of each row

float own_top[MQ * OWN_ROWS], own_weight[MQ * OWN_ROWS];  // weight: the sum over this lane's columns only

uint own_row(uint r) { return gl_SubgroupInvocationID / max(ROW_LANES, 1) + r * (FM / OWN_ROWS); }

float max_over_row(float v) {
    [[unroll]] for (uint on = 1; on < ROW_LANES; on *= 2) v = max(v, subgroupShuffleXor(v, on));
    return v;
}

float sum_over_row(float v) {
    [[unroll]] for (uint on = 1; on < ROW_LANES; on *= 2) v += subgroupShuffleXor(v, on);
    return v;
}

// Turns a block's scores into weights, as matrices A, and rescales the sums so far.
void weigh_in_registers(uint m, inout MATRIX_SUM score[NS], out MATRIX_A p_matrix[NP]) {
    MATRIX_SUM factors;
    [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
        float highest = score[0][r * EACH];
        [[unroll]] for (uint s = 0; s < NS; s++)
            [[unroll]] for (uint e = 0; e < EACH; e++) highest = max(highest, score[s][r * EACH + e]);
        const uint at = m * OWN_ROWS + r;
        const float before = own_top[at], now = max(before, max_over_row(highest)), top = max(now, LOWEST), factor = exp2(before - now);
        own_top[at] = now;
        float weight = own_weight[at] * factor;
        [[unroll]] for (uint s = 0; s < NS; s++)
            [[unroll]] for (uint e = 0; e < EACH; e++) {
                const float one = exp2(score[s][r * EACH + e] - top);
                weight += one;
                p_matrix[min(s, NP - 1)][r * EACH + e] = float16_t(one);
            }
        own_weight[at] = weight;
        [[unroll]] for (uint e = 0; e < EACH; e++) factors[r * EACH + e] = factor;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
}

// Normalizes the sums of matrix row m.
void finish_in_registers(uint m, uint query0) {
    MATRIX_SUM factors;
    [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
        const uint at = m * OWN_ROWS + r, query = query0 + first_row_of(m) + own_row(r);
        const float factor = normalizer(query, own_top[at], sum_over_row(own_weight[at]));
        [[unroll]] for (uint e = 0; e < EACH; e++) factors[r * EACH + e] = factor;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
}

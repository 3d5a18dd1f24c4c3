// Online softmax of attention/prompt_matrix.comp in registers, where the start-up check found that ROW_LANES neighbouring lanes share a row of
// a matrix of sums, and that a matrix A has its elements where a matrix of sums has them (mat_mul/fragment_map.comp). Needs first_row_of(m).

const uint OWN_ROWS = ROW_LANES != 0 ? FM * ROW_LANES / SG : 1;  // rows of a matrix that a lane has elements of, in this order
const uint EACH = ELEMENTS / OWN_ROWS;                          // elements of each

float own_top[MQ * OWN_ROWS], own_weight[MQ * OWN_ROWS];  // the weight is that of this lane's columns alone

uint own_row(uint r) { return gl_SubgroupInvocationID / max(ROW_LANES, 1) + r * (FM / OWN_ROWS); }

float max_over_row(float v) {
    [[unroll]] for (uint on = 1; on < ROW_LANES; on *= 2) v = max(v, subgroupShuffleXor(v, on));
    return v;
}

float sum_over_row(float v) {
    [[unroll]] for (uint on = 1; on < ROW_LANES; on *= 2) v += subgroupShuffleXor(v, on);
    return v;
}

// Makes weights of a block's scores, scales what was summed so far, and turns the weights into matrices A.
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

// Multiplies the sums of matrix row m by what they are multiplied by in the end.
void finish_in_registers(uint m, uint query0) {
    MATRIX_SUM factors;
    [[unroll]] for (uint r = 0; r < OWN_ROWS; r++) {
        const uint at = m * OWN_ROWS + r, query = query0 + first_row_of(m) + own_row(r);
        const float factor = normalizer(query, own_top[at], sum_over_row(own_weight[at]));
        [[unroll]] for (uint e = 0; e < EACH; e++) factors[r * EACH + e] = factor;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
}

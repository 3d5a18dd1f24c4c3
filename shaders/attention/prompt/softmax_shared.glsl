// Online softmax of attention/prompt/prompt_matrix.comp through shared memory, for devices where it is unknown which elements of a matrix a lane
// holds. Sums of weights are kept per element and added up over each row at the end.

// Maximum and sum of a lane's share of its matrix row in scratch; the row is turn + lane / REDUCE_LANES.
float part_max(uint at) {
    float found = MASKED;
    [[unroll]] for (uint i = 0; i < FN / 4 / REDUCE_LANES; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found = max(found, max(max(v.x, v.y), max(v.z, v.w)));
    }
    [[unroll]] for (uint offset = 1; offset < REDUCE_LANES; offset *= 2) found = max(found, subgroupShuffleXor(found, offset));
    return found;
}

float part_sum(uint at) {
    float found = 0.0;
    [[unroll]] for (uint i = 0; i < FN / 4 / REDUCE_LANES; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found += v.x + v.y + v.z + v.w;
    }
    [[unroll]] for (uint offset = 1; offset < REDUCE_LANES; offset *= 2) found += subgroupShuffleXor(found, offset);
    return found;
}

// Finds the new row maxima, and the factors for the sums so far. higher: a matrix whose row maxima are those of the scores.
void find_maxima(MATRIX_SUM block_max, uint mine, uint first_row) {
    coopMatStore(block_max, scratch, mine, MAXIMA_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint base = 0; base < FM; base += SG / REDUCE_LANES) {
        const uint row = base + gl_SubgroupInvocationID / REDUCE_LANES;
        const float found =
            part_max(mine + min(row, FM - 1u) * MAXIMA_PITCH + gl_SubgroupInvocationID % REDUCE_LANES * (FN / 4 / REDUCE_LANES));
        if (row < FM && gl_SubgroupInvocationID % REDUCE_LANES == 0u) {
            const float old_max = row_max[first_row + row], new_max = max(old_max, found);
            row_max[first_row + row] = new_max;
            row_factor[first_row + row] = exp2(old_max - new_max);
        }
    }
    subgroup_sync();
}

// Turns a block's scores into weights, as matrices A, and rescales the sums so far.
void softmax_in_shared(uint m, inout MATRIX_SUM score[NS], uint mine, out MATRIX_A p_matrix[NP]) {
    const uint first_row = (gl_SubgroupID * MQ + m) * FM;
    MATRIX_SUM block_max = score[0];
    [[unroll]] for (uint s = 1; s < NS; s++)
        [[unroll]] for (uint e = 0; e < ELEMENTS; e++) block_max[e] = max(block_max[e], score[s][e]);
    find_maxima(block_max, mine, first_row);

    MATRIX_SUM factors;
    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) {
        const uint row = first_row + element_position[e] / 256u;
        const float finite_max = max(row_max[row], LOWEST), factor = row_factor[row];
        float weight_sum = weight_sums[m][e] * factor;
        [[unroll]] for (uint s = 0; s < NS; s++) {
            score[s][e] = exp2(score[s][e] - finite_max);
            weight_sum += score[s][e];
        }
        weight_sums[m][e] = weight_sum;
        factors[e] = factor;
    }
    [[unroll]] for (uint o = 0; o < NO; o++) sums[m * NO + o] = sums[m * NO + o] * factors;
    [[unroll]] for (uint s = 0; s < NS; s++)
        coopMatStore(MATRIX_WEIGHT(score[s]), scratch, mine + s * FN / 8, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint k = 0; k < NP; k++) coopMatLoad(p_matrix[k], scratch, mine + k * FK / 8, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
}

// Puts the factors that normalize the sums of matrix row m into row_factor.
void normalize_in_shared(uint m, uint query0, uint mine) {
    const uint first_row = (gl_SubgroupID * MQ + m) * FM, lane = gl_SubgroupInvocationID;
    coopMatStore(weight_sums[m], scratch, mine, MAXIMA_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint base = 0; base < FM; base += SG / REDUCE_LANES) {
        const uint row = base + lane / REDUCE_LANES;
        const float weight_sum = part_sum(mine + min(row, FM - 1u) * MAXIMA_PITCH + lane % REDUCE_LANES * (FN / 4 / REDUCE_LANES));
        if (row < FM && lane % REDUCE_LANES == 0u)
            row_factor[first_row + row] = normalizer(query0 + first_row + row, row_max[first_row + row], weight_sum);
    }
    subgroup_sync();
}

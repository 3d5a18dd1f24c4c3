// Online softmax of attention/prompt_matrix.comp through shared memory, for devices where it is unknown which elements of a matrix a lane
// holds. Sums of weights are kept per element and added up over each row at the end.

// Maximum and sum of a lane's part of its matrix row in scratch; the row is turn + lane / SHARE.
float part_max(uint at) {
    float found = MASKED;
    [[unroll]] for (uint i = 0; i < FN / 4 / SHARE; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found = max(found, max(max(v.x, v.y), max(v.z, v.w)));
    }
    [[unroll]] for (uint step_size = 1; step_size < SHARE; step_size *= 2) found = max(found, subgroupShuffleXor(found, step_size));
    return found;
}

float part_sum(uint at) {
    float found = 0.0;
    [[unroll]] for (uint i = 0; i < FN / 4 / SHARE; i++) {
        const vec4 v = uintBitsToFloat(scratch[at + i]);
        found += v.x + v.y + v.z + v.w;
    }
    [[unroll]] for (uint step_size = 1; step_size < SHARE; step_size *= 2) found += subgroupShuffleXor(found, step_size);
    return found;
}

// Finds the new row maxima, and the factors for the sums so far. higher: a matrix whose row maxima are those of the scores.
void find_maxima(MATRIX_SUM higher, uint mine, uint first_row) {
    coopMatStore(higher, scratch, mine, MAX_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint turn = 0; turn < FM; turn += SG / SHARE) {
        const uint row = turn + gl_SubgroupInvocationID / SHARE;
        const float found = part_max(mine + min(row, FM - 1u) * MAX_PITCH + gl_SubgroupInvocationID % SHARE * (FN / 4 / SHARE));
        if (row < FM && gl_SubgroupInvocationID % SHARE == 0u) {
            const float before = row_top[first_row + row], now = max(before, found);
            row_top[first_row + row] = now;
            row_factor[first_row + row] = exp2(before - now);
        }
    }
    subgroup_sync();
}

// Turns a block's scores into weights, as matrices A, and rescales the sums so far.
void weigh_through_shared(uint m, inout MATRIX_SUM score[NS], uint mine, out MATRIX_A p_matrix[NP]) {
    const uint first_row = (gl_SubgroupID * MQ + m) * FM;
    MATRIX_SUM higher = score[0];
    [[unroll]] for (uint s = 1; s < NS; s++)
        [[unroll]] for (uint e = 0; e < ELEMENTS; e++) higher[e] = max(higher[e], score[s][e]);
    find_maxima(higher, mine, first_row);

    MATRIX_SUM factors;
    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) {
        const uint row = first_row + place[e] / 256u;
        const float top = max(row_top[row], LOWEST), factor = row_factor[row];
        float weight = weights[m][e] * factor;
        [[unroll]] for (uint s = 0; s < NS; s++) {
            score[s][e] = exp2(score[s][e] - top);
            weight += score[s][e];
        }
        weights[m][e] = weight;
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
void finish_through_shared(uint m, uint query0, uint mine) {
    const uint first_row = (gl_SubgroupID * MQ + m) * FM, lane = gl_SubgroupInvocationID;
    coopMatStore(weights[m], scratch, mine, MAX_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    [[unroll]] for (uint turn = 0; turn < FM; turn += SG / SHARE) {
        const uint row = turn + lane / SHARE;
        const float weight = part_sum(mine + min(row, FM - 1u) * MAX_PITCH + lane % SHARE * (FN / 4 / SHARE));
        if (row < FM && lane % SHARE == 0u) row_factor[first_row + row] = normalizer(query0 + first_row + row, row_top[first_row + row], weight);
    }
    subgroup_sync();
}

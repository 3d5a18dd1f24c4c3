// Sums of ROWS values over SUM_LANES neighbouring lanes of a subgroup, by shuffles. ROWS is a power of two, at most 16 and at most SUM_LANES.

// Each half of the lanes keeps one half of the rows and adds what the other half of the lanes has of them.
void halve(inout float v[ROWS], uint half_rows, uint lane) {
    const bool upper = (lane & half_rows) != 0;
    [[unroll]] for (uint r = 0; r < half_rows; r++) {
        const float kept = upper ? v[r + half_rows] : v[r];
        const float given = upper ? v[r] : v[r + half_rows];
        v[r] = kept + subgroupShuffleXor(given, half_rows);
    }
}

// The sum of row `lane % ROWS`. Every lane calls.
float rows_sum(float v[ROWS], uint lane) {
#if ROWS > 8
    halve(v, 8, lane);
#endif
#if ROWS > 4
    halve(v, 4, lane);
#endif
#if ROWS > 2
    halve(v, 2, lane);
#endif
#if ROWS > 1
    halve(v, 1, lane);
#endif
    // Written out, as in common/reduce.glsl.
    if (ROWS <= 1 && SUM_LANES > 1) v[0] += subgroupShuffleXor(v[0], 1);
    if (ROWS <= 2 && SUM_LANES > 2) v[0] += subgroupShuffleXor(v[0], 2);
    if (ROWS <= 4 && SUM_LANES > 4) v[0] += subgroupShuffleXor(v[0], 4);
    if (ROWS <= 8 && SUM_LANES > 8) v[0] += subgroupShuffleXor(v[0], 8);
    if (SUM_LANES > 16) v[0] += subgroupShuffleXor(v[0], 16);
    if (SUM_LANES > 32) v[0] += subgroupShuffleXor(v[0], 32);
    return v[0];
}

// Sums of SUM_VALUES values over SUM_LANES neighbouring lanes of a subgroup, by shuffles. SUM_VALUES is a power of two, at most 16 and at
// most SUM_LANES.

// Each half of the lanes keeps one half of the values and adds what the other half of the lanes has of them.
void halve(inout float v[SUM_VALUES], uint half_values, uint lane) {
    const bool upper = (lane & half_values) != 0;
    [[unroll]] for (uint i = 0; i < half_values; i++) {
        const float kept = upper ? v[i + half_values] : v[i];
        const float given = upper ? v[i] : v[i + half_values];
        v[i] = kept + subgroupShuffleXor(given, half_values);
    }
}

// The sum of value `lane % SUM_VALUES`. Every lane calls.
float lane_sums(float v[SUM_VALUES], uint lane) {
#if SUM_VALUES > 8
    halve(v, 8, lane);
#endif
#if SUM_VALUES > 4
    halve(v, 4, lane);
#endif
#if SUM_VALUES > 2
    halve(v, 2, lane);
#endif
#if SUM_VALUES > 1
    halve(v, 1, lane);
#endif
    // Written out, as in common/reduce.glsl.
    if (SUM_VALUES <= 1 && SUM_LANES > 1) v[0] += subgroupShuffleXor(v[0], 1);
    if (SUM_VALUES <= 2 && SUM_LANES > 2) v[0] += subgroupShuffleXor(v[0], 2);
    if (SUM_VALUES <= 4 && SUM_LANES > 4) v[0] += subgroupShuffleXor(v[0], 4);
    if (SUM_VALUES <= 8 && SUM_LANES > 8) v[0] += subgroupShuffleXor(v[0], 8);
    if (SUM_LANES > 16) v[0] += subgroupShuffleXor(v[0], 16);
    if (SUM_LANES > 32) v[0] += subgroupShuffleXor(v[0], 32);
    return v[0];
}

// Sums SUM_VALUES values over SUM_LANES neighbouring lanes of a subgroup, by shuffles; lane i ends up with the sum of value i % SUM_VALUES.
// Each step halves the number of values, so this takes far fewer shuffles than SUM_VALUES separate reductions.
// SUM_VALUES is a power of two, at most 16 and at most SUM_LANES.

#include "common/lane_butterfly.glsl"

// One step: a lane keeps half of its values, sends the other half to its partner, and adds what the partner has of the half it keeps.
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
    LANE_BUTTERFLY(v[0], BUTTERFLY_ADD, SUM_VALUES, SUM_LANES)
    return v[0];
}

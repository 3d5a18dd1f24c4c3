// The largest of many logits; of equals, the one with the lowest index. A candidate is (key, index). Keys are unsigned integers in the order of
// the floats; NaN has the largest key of all, so a single NaN wins over every number and shows.
//
//   uvec2 candidate(float logit, uint index)
//   uvec2 max_candidate(uvec2 a, uvec2 b)
//   uvec2 wg_max_candidate(uvec2 mine)    every thread calls; every thread gets the result
//
// Include common/reduce.glsl first.

const uint NAN_KEY = 0xfffffffeu;
const uvec2 NO_CANDIDATE = uvec2(0u, 0xffffffffu);

uvec2 candidate(float logit, uint index) {
    uint bits = floatBitsToUint(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uvec2(NAN_KEY, index);
    if (bits == 0x80000000u) bits = 0u;    // -0 equals +0
    return uvec2((bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u, index);
}

uvec2 max_candidate(uvec2 a, uvec2 b) {
    return b.x > a.x || (b.x == a.x && b.y < a.y) ? b : a;
}

uvec2 wg_max_candidate(uvec2 mine) {
    const uint key = wg_max(mine.x);
    // The lowest index among the largest keys has the largest complement.
    return uvec2(key, ~wg_max(mine.x == key ? ~mine.y : 0u));
}

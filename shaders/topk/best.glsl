// The largest of many logits, the first of equals. A candidate is (key, index): keys are unsigned and order as the floats do, and NaN has the
// largest of all, so that one NaN wins over any number.
//
//   uvec2 candidate(float logit, uint index)
//   uvec2 better(uvec2 a, uvec2 b)
//   uvec2 best_of_workgroup(uvec2 mine)     every thread calls; the result in every thread
//
// Needs common/reduce.glsl before it.

const uint NAN_KEY = 0xfffffffeu;
const uvec2 NOTHING = uvec2(0u, 0xffffffffu);

uvec2 candidate(float logit, uint index) {
    uint bits = floatBitsToUint(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uvec2(NAN_KEY, index);
    if (bits == 0x80000000u) bits = 0u;    // -0 is no smaller than +0
    return uvec2((bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u, index);
}

uvec2 better(uvec2 a, uvec2 b) {
    return b.x > a.x || (b.x == a.x && b.y < a.y) ? b : a;
}

uvec2 best_of_workgroup(uvec2 mine) {
    const uint key = wg_max(mine.x);
    // The smallest index among the largest keys is the largest complement.
    return uvec2(key, ~wg_max(mine.x == key ? ~mine.y : 0u));
}

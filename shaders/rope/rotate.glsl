// Rotates a pair of values by an angle given as (cos, sin). precise:
// product and sum are not contracted to an fma, so that all kernels that rotate the same pair store the same bits.
vec2 rotate_pair(vec2 pair, vec2 angle) {
    precise vec2 rotated = vec2(pair.x * angle.x - pair.y * angle.y, pair.x * angle.y + pair.y * angle.x);
    return rotated;
}

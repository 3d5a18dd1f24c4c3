// A pair of values turned by an angle, given as (cos, sin). No product is fused with the sum: kernels that turn the same pair store the same
// bits, whatever stands around it.
vec2 turn_pair(vec2 pair, vec2 angle) {
    precise vec2 turned = vec2(pair.x * angle.x - pair.y * angle.y, pair.x * angle.y + pair.y * angle.x);
    return turned;
}

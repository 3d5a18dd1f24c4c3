// Turns a pair of dimensions by an angle's (cos, sin).
vec2 rope_rotate(vec2 v, vec2 angle) {
    return vec2(v.x * angle.x - v.y * angle.y, v.x * angle.y + v.y * angle.x);
}

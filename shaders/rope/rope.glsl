// The rotation of RoPE and YaRN: cosine and sine for a pair of dimensions at a position.
//
//   vec2 rope_angle(uint pair, int pos)                   (cos, sin) of pos * frequency[pair], times ROPE_MSCALE
//   vec2 rope_angle(uint pair, int pos, float factor)     the same with the frequency divided by a frequency factor
//   vec2 rope_rotate(vec2 v, vec2 angle)                  v turned by the angle
//   uvec2 rope_dims(uint pair)                            the two dimensions of a head that make up a pair
//
// Angles are counted in turns as 32-bit fractions: pos * frequency wraps around by itself, so position 131072 is as exact as
// position 1 (a product in float would be off by 0.008 radians there). Sine and cosine are polynomials over an eighth of a turn, since Vulkan
// promises only 2^-11 for its own.
//
// Defines:
//   ROPE_PAIRS   pairs that are turned, n_dims / 2
//   ROPE_TURNS   their frequencies in turns a position, as 32-bit fractions, comma-separated: vkback.ops.rope_angles.turns
//   ROPE_MSCALE  factor on both components (attention factor and YaRN's correction)
//   ROPE_NEOX    0: neighbouring dimensions make a pair; 1: dimension i pairs with i + n_dims / 2

const uint rope_turns[ROPE_PAIRS] = uint[](ROPE_TURNS);

vec2 rope_cos_sin(uint turn) {
    const uint quarter = (turn + 0x20000000u) >> 30;
    const float x = float(int(turn - (quarter << 30))) * 1.46291807926716e-9;    // 2 pi / 2^32
    const float xx = x * x;
    // Taylor series: the first terms left out are below 4e-9 at an eighth of a turn.
    const float s = x * (1.0 + xx * (-1.0 / 6.0 + xx * (1.0 / 120.0 + xx * (-1.0 / 5040.0 + xx * (1.0 / 362880.0)))));
    const float c = 1.0 + xx * (-0.5 + xx * (1.0 / 24.0 + xx * (-1.0 / 720.0 + xx * (1.0 / 40320.0 - xx * (1.0 / 3628800.0)))));
    const vec2 turned = (quarter & 1u) == 0u ? vec2(c, s) : vec2(-s, c);
    return (quarter & 2u) == 0u ? turned : -turned;
}

vec2 rope_angle(uint pair, int pos) {
    return ROPE_MSCALE * rope_cos_sin(uint(pos) * rope_turns[pair]);
}

vec2 rope_angle(uint pair, int pos, float factor) {
    // Factors other than 1 slow down pairs of long wavelength only, whose frequency fits a float's 24 bits.
    const uint turns = rope_turns[pair];
    return ROPE_MSCALE * rope_cos_sin(uint(pos) * (factor == 1.0 ? turns : uint(float(turns) / factor + 0.5)));
}

vec2 rope_rotate(vec2 v, vec2 angle) {
    return vec2(v.x * angle.x - v.y * angle.y, v.x * angle.y + v.y * angle.x);
}

uvec2 rope_dims(uint pair) {
#if ROPE_NEOX
    return uvec2(pair, pair + ROPE_PAIRS);
#else
    return uvec2(2u * pair, 2u * pair + 1u);
#endif
}

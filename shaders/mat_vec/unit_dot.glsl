// Integer path: the dot product of a unit of 32 weights and a unit of x. Include quant/*.glsl, common/int_dot.glsl and mat_vec/act.glsl first.
//
//   Unit decoded(raw)              the part that is the same for every token
//   float dot_unit(raw, unit, a)   the dot product with one token's unit

#ifdef UNIT_DOT
struct Unit { uint q[UNIT_WORDS]; };

Unit decoded(UnitRaw raw) {
    Unit u;
    unit_words(raw, u.q);
    return u;
}

float dot_unit(UnitRaw raw, Unit u, Act a) {
    return UNIT_DOT * a.d * unit_dot(raw, u.q, a.q, a.int_sum);
}
#else
struct Unit { uint q[8]; vec2 scale, bias; };

Unit decoded(UnitRaw raw) {
    Unit u;
    unit_ints(raw, u.q, u.scale, u.bias);
    return u;
}

float dot_unit(UnitRaw raw, Unit u, Act a) {
    const ivec2 halves = halves_dot(u.q, a.q, ivec2(0));
  #if UNIT_HALVES
    return a.d * (u.scale.x * float(halves.x) + u.scale.y * float(halves.y)) - dot(u.bias, a.sum);
  #elif UNIT_BIAS
    return a.d * (u.scale.x * float(halves.x + halves.y)) - u.bias.x * (a.sum.x + a.sum.y);
  #else
    return a.d * (u.scale.x * float(halves.x + halves.y));
  #endif
}
#endif

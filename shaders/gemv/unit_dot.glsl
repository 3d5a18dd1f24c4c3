// Integer path: dot product of a unit of 32 weights with a unit of Q8_1 activations.
// Include the type's file of quant/, common/int_dot.glsl and gemv/act.glsl first.
//
//   Unit decode_unit(raw)          the weights unpacked to bytes: done once for all tokens
//   float dot_unit(raw, unit, a)   sum of weight * x over the unit, for one token
//
// A type with UNIT_DOT brings its own dot product. For the others weight = scale * q - bias and x = d * xq, so
//   sum of weight * x = d * scale * (sum of q * xq) - bias * (sum of x),
// where the last sum is stored with x.

#ifdef UNIT_DOT
struct Unit { uint q[UNIT_WORDS]; };

Unit decode_unit(UnitRaw raw) {
    Unit u;
    unit_words(raw, u.q);
    return u;
}

float dot_unit(UnitRaw raw, Unit u, Act a) {
    return UNIT_DOT * a.d * unit_dot(raw, u.q, a.q, a.int_sum);
}
#else
struct Unit { uint q[8]; vec2 scale, bias; };

Unit decode_unit(UnitRaw raw) {
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

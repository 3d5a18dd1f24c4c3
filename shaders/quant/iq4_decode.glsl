// What IQ4_NL and IQ4_XS share. The type has UnitRaw with `qs`, and float unit_step(UnitRaw), the scale of the unit.
// Dot products take the levels as signed bytes. The float path takes level + 128, unsigned, which some devices convert in one instruction.
#if PATH_INT
#define UNIT_BIAS 0
#define UNIT_SIGNED 1
#else
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#endif

#ifdef PAIRS_IN_SHARED
#include "quant/iq4_pairs.glsl"
#endif

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
#ifdef PAIRS_IN_SHARED
    levels_by_pairs(r.qs, q);
#else
    iq4_levels(r.qs, UNIT_SIGNED == 1 ? 0u : 0x80u, q);
#endif
    scale = vec2(unit_step(r));
    bias = float(128 * UNIT_BIAS) * scale;
}
#include "quant/decode_ints.glsl"

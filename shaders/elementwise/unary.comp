#version 450
// y = FUNCTION(x), elementwise.
//
//   binding 0  x F32
//   binding 1  y F32
//
// One thread per WIDTH values.
//
// Defines:
//   FUNCTION  a function of one float: one of those below, of elementwise/functions.glsl or of GLSL itself
//   WIDTH     4: the count is a multiple of 4; 1: any count
//   those of common/sentinel.glsl and common/arrivals.glsl
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;
#include "common/arrivals.glsl"

layout(push_constant) uniform Push {
    uint elements;
    float a;
    float b;
} p;

#if WIDTH == 4
#define ELEMENT vec4
#else
#define ELEMENT float
#endif
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InX { ELEMENT x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { ELEMENT y[]; };
#include "elementwise/functions.glsl"
#include "elementwise/series.glsl"

float scale(float v) { return p.a * v + p.b; }
float clamp_to(float v) { return clamp(v, p.a, p.b); }
float leaky_relu(float v) { return max(v, 0.0) + p.a * min(v, 0.0); }
float relu(float v) { return max(v, 0.0); }
float neg(float v) { return -v; }
float sqr(float v) { return v * v; }
float step_up(float v) { return v > 0.0 ? 1.0 : 0.0; }
float elu(float v) { return v > 0.0 ? v : exp_bounded(v) - 1.0; }
float hardsigmoid(float v) { return clamp((v + 3.0) / 6.0, 0.0, 1.0); }
float hardswish(float v) { return v * hardsigmoid(v); }
// log(1 + e^v); for v > 20 that is v in f32.
float softplus(float v) { return v > 20.0 ? v : log(1.0 + exp_bounded(v)); }
// Rounds half away from zero.
float round_away(float v) {
    const float whole = trunc(v);
    return abs(v - whole) >= 0.5 ? whole + sign(v) : whole;
}
// beta 0.5, eps 1e-7
float xielu(float v) {
    if (v > 0.0) return softplus(p.b) * v * v + 0.5 * v;
    return (expm1_exact(min(v, 1e-7)) - v) * (0.5 + softplus(p.a)) + 0.5 * v;
}

// A NaN stays one: bounds and comparisons within the functions would make a number of it, and nobody would learn that an earlier value was none.
float apply(float v) { return (floatBitsToUint(v) & 0x7fffffffu) > 0x7f800000u ? v : FUNCTION(v); }

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i < p.elements) {
        ELEMENT v;
        SPIN_UNTIL(v = x[i], arrived(v));
#if WIDTH == 4
        for (int c = 0; c < 4; c++) v[c] = apply(v[c]);
#else
        v = apply(v);
#endif
        y[i] = not_sentinel(v);
    }
    arrive();
}

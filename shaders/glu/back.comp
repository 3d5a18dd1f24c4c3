#version 450
// Gradients of activations, elementwise. dx = dy f'(x); for gated ones, y = f(gate) up: dgate = dy up f'(gate), dup = dy f(gate).
//
//   binding 0  dy F32 [elements]
//   binding 1  x, or gate, F32 [elements]
//   binding 2  dx, or dgate, F32 [elements]; may be one of the inputs
//   binding 3  up F32 [elements] (GATED)
//   binding 4  dup F32 [elements] (GATED); may be one of the inputs
//
// One thread per value.
//
// Defines: WG_SIZE; ACTIVATION silu, gelu, gelu_erf or gelu_quick; GATED 0 or 1
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutDx { float dx[]; };
#if GATED
layout(std430, set = 0, binding = 3) readonly buffer InUp { float up[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutDup { float dup[]; };
#endif
#include "elementwise/functions.glsl"

// Each returns the function's value and its derivative.
vec2 silu_both(float v) {
    const float s = sigmoid(v);
    return vec2(v * s, s * (1.0 + v * (1.0 - s)));
}

// 0.7978845608 = sqrt(2 / pi); 0.134145 = 3 * 0.044715
vec2 gelu_both(float v) {
    const float t = tanh_exact(0.7978845608 * v * (1.0 + 0.044715 * v * v));
    const float inner = 0.7978845608 * (1.0 + 0.134145 * v * v);
    return vec2(0.5 * v * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * inner);
}

// 0.3989422804 = 1 / sqrt(2 pi)
vec2 gelu_erf_both(float v) {
    const float half_sum = 0.5 * (1.0 + erf_near(v * 0.7071067812));
    return vec2(v * half_sum, half_sum + 0.3989422804 * v * exp_bounded(-0.5 * v * v));
}

vec2 gelu_quick_both(float v) {
    const float s = sigmoid(1.702 * v);
    return vec2(v * s, s * (1.0 + 1.702 * v * (1.0 - s)));
}

#define JOINED(a, b) a##b
#define BOTH(name) JOINED(name, _both)

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const vec2 f = BOTH(ACTIVATION)(x[i]);
    const float g = dy[i];
#if GATED
    const float u = up[i];
    dx[i] = g * u * f.y;
    dup[i] = g * f.x;
#else
    dx[i] = g * f.y;
#endif
}

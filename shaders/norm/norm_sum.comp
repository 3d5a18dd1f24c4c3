#version 450
// RMS_NORM_SUM of one row: y = norm(a) * wa + scale * (b + norm(b) * wb).
//
//   binding 0  a F32 [DIM]
//   binding 1  wa F32 [DIM]
//   binding 2  b F32 [DIM]
//   binding 3  wb F32 [DIM]
//   binding 4  y F32 [DIM]
//
// One workgroup: thread t has quads (4 values) t, t + WG_SIZE, ..., in registers.
//
// Defines: DIM; those of common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    float eps;
    float scale;
} p;

#define QUADS (DIM / 4u)
#define ROUNDS ((QUADS + WG_SIZE - 1u) / WG_SIZE)

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InA { vec4 a4[]; };
layout(std430, set = 0, binding = 1) readonly buffer InWa { vec4 wa4[]; };
layout(std430, set = 0, binding = 2) SYNC_INPUT buffer InB { vec4 b4[]; };
layout(std430, set = 0, binding = 3) readonly buffer InWb { vec4 wb4[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutY { vec4 y4[]; };

void main() {
    const uint t = gl_LocalInvocationID.x;
    vec4 a[ROUNDS], b[ROUNDS], wa[ROUNDS], wb[ROUNDS];
    vec2 squares = vec2(0.0);
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, QUADS - 1u);
        wa[i] = wa4[quad];
        wb[i] = wb4[quad];
#if SPINS_ON_ALL
        SPIN_UNTIL(b[i] = b4[quad], arrived(b[i]));
#else
        b[i] = b4[quad];
#endif
    }
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, QUADS - 1u);
        SPIN_UNTIL(a[i] = a4[quad], arrived(a[i]));
        if (i * WG_SIZE + t < QUADS) squares += vec2(dot(a[i], a[i]), dot(b[i], b[i]));
    }
    const float norm_a = 1.0 / sqrt(wg_sum(squares.x) / float(DIM) + p.eps), norm_b = 1.0 / sqrt(wg_sum(squares.y) / float(DIM) + p.eps);
    [[unroll]] for (uint i = 0u; i < ROUNDS; i++) {
        const uint quad = i * WG_SIZE + t;
        if (quad < QUADS) y4[quad] = not_sentinel(a[i] * norm_a * wa[i] + p.scale * (b[i] + b[i] * norm_b * wb[i]));
    }
}

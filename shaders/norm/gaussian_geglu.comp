#version 450
// GAUSSIAN_GEGLU of one row: y = gelu(max(gate - (mean + scale * standard deviation), 0)) * up, mean and deviation those of gate's values.
//
//   binding 0  gate F32 [DIM]
//   binding 1  up F32 [DIM]
//   binding 2  y F32 or Q8_1 (OUT_Q8_1) [DIM]
//
// Every workgroup finds mean and deviation by itself, thread t of quads t, t + WG_SIZE, ..., and makes WG_SIZE quads of y.
//
// Defines: DIM OUT_Q8_1; those of common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#define REDUCE_GROUPS OUT_Q8_1
#include "common/reduce.glsl"
#include "common/sentinel.glsl"
#include "elementwise/functions.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push { float scale; } p;

#define QUADS (DIM / 4u)
#define AT_ONCE 8u

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InGate { vec4 gate4[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InUp { vec4 up4[]; };
#if OUT_Q8_1
layout(std430, set = 0, binding = 2) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 2) writeonly buffer OutY { vec4 y4[]; };
#endif

vec4 kept[AT_ONCE];

void load(uint from) {
    [[unroll]] for (uint i = 0u; i < AT_ONCE; i++) kept[i] = gate4[min(from + i * WG_SIZE, QUADS - 1u)];
}

#if SPINS
bool all_arrived() {
    bool valid = true;
    [[unroll]] for (uint i = 0u; i < AT_ONCE; i++) valid = valid && arrived(kept[i]);
    return valid;
}
#endif

void main() {
    const uint t = gl_LocalInvocationID.x, quad = gl_WorkGroupID.x * WG_SIZE + t;
    const bool valid = quad < QUADS;
    float sum = 0.0;
    for (uint from = t; from < QUADS; from += AT_ONCE * WG_SIZE) {
        SPIN_UNTIL(load(from), all_arrived());
        [[unroll]] for (uint i = 0u; i < AT_ONCE; i++)
            if (from + i * WG_SIZE < QUADS) sum += dot(kept[i], vec4(1.0));
    }
    const float mean = wg_sum(sum) / float(DIM);
    float squares = 0.0;
    for (uint from = t; from < QUADS; from += AT_ONCE * WG_SIZE) {
        if (QUADS > AT_ONCE * WG_SIZE) load(from);
        [[unroll]] for (uint i = 0u; i < AT_ONCE; i++)
            if (from + i * WG_SIZE < QUADS) squares += dot(kept[i] - mean, kept[i] - mean);
    }
    const float cutoff = mean + p.scale * sqrt(wg_sum(squares) / float(DIM));
    vec4 y = vec4(0.0);
    if (valid) {
        vec4 up;
        SPIN_UNTIL(up = up4[quad], arrived(up));
        const vec4 gate = max(gate4[quad] - cutoff, vec4(0.0));
        y = vec4(gelu(gate.x), gelu(gate.y), gelu(gate.z), gelu(gate.w)) * up;
    }
#if OUT_Q8_1
    const Q8_1Quad packed = q8_1_pack(quad, y);
    if (valid) q8_1_store(0u, (DIM + 31u) / 32u, quad, packed);
#else
    if (valid) y4[quad] = not_sentinel(y);
#endif
}

#version 450
// AltUp (arXiv 2301.13310): the streams of a token before a layer (CORRECT 0) and behind it (CORRECT 1). Stream 0 is the active one, which
// the layer works on. m = tanh(logits) says how the streams are mixed.
//
//   CORRECT 0  y[s] = x[s] + sum over r of x[r] * (coef[s, r] . m), where ADDED is added to every x but the active one
//   CORRECT 1  y[s] = x[s] + (1 + coef[s] . m) * (made - x[0]); with SCALED also y[0] times output_scale
//
//   binding 0  active F32 [n, n_embd]                 x[0]
//   binding 1  others F32 [n, STREAMS - 1, n_embd]    x[1] and the rest
//   binding 2  logits F32 [n, STREAMS]
//   binding 3  coef F32 [STREAMS * STREAMS * STREAMS], CORRECT 1: [STREAMS * STREAMS]
//   binding 4  F32 [n, n_embd]                        y[0]
//   binding 5  F32 [n, STREAMS - 1, n_embd]           y[1] and the rest
//   binding 6  F32 [n, n_embd]                        added (ADDED), or made (CORRECT 1)
//   binding 7  output_scale F32 [n_embd]              SCALED
//   binding 8  F32 [n, n_embd]                        y[0] * output_scale (SCALED)
//
// A thread takes one column of all streams of a token.
//
// Defines: WG_SIZE STREAMS CORRECT ADDED SCALED

#extension GL_EXT_control_flow_attributes : require
#include "elementwise/functions.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint columns;   // n * n_embd
    uint n_embd;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InActive { float first[]; };
layout(std430, set = 0, binding = 1) readonly buffer InOthers { float others[]; };
layout(std430, set = 0, binding = 2) readonly buffer InLogits { float logits[]; };
layout(std430, set = 0, binding = 3) readonly buffer InCoef { float coef[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutActive { float y_first[]; };
layout(std430, set = 0, binding = 5) writeonly buffer OutOthers { float y_others[]; };
#if CORRECT || ADDED
layout(std430, set = 0, binding = 6) readonly buffer InMore { float more[]; };
#endif

#if SCALED
layout(std430, set = 0, binding = 7) readonly buffer InScale { float output_scale[]; };
layout(std430, set = 0, binding = 8) writeonly buffer OutScaled { float y_scaled[]; };
#endif

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.columns) return;
    const uint token = i / p.n_embd;
    const uint at = token * (STREAMS - 1u) * p.n_embd + i % p.n_embd;
    float x[STREAMS], m[STREAMS];
    x[0] = first[i];
    [[unroll]] for (uint s = 1u; s < STREAMS; s++) x[s] = others[at + (s - 1u) * p.n_embd];
    [[unroll]] for (uint s = 0u; s < STREAMS; s++) m[s] = tanh_exact(logits[token * STREAMS + s]);
#if ADDED
    [[unroll]] for (uint s = 1u; s < STREAMS; s++) x[s] += more[i];
#endif
#if CORRECT
    const float change = more[i] - x[0];
#endif
    [[unroll]] for (uint s = 0u; s < STREAMS; s++) {
        float sum = x[s];
#if CORRECT
        float weight = 1.0;
        [[unroll]] for (uint k = 0u; k < STREAMS; k++) weight += coef[s * STREAMS + k] * m[k];
        sum += weight * change;
#else
        [[unroll]] for (uint r = 0u; r < STREAMS; r++) {
            float weight = 0.0;
            [[unroll]] for (uint k = 0u; k < STREAMS; k++) weight += coef[(s * STREAMS + r) * STREAMS + k] * m[k];
            sum += weight * x[r];
        }
#endif
#if SCALED
        if (s == 0u) y_scaled[i] = sum * output_scale[i % p.n_embd];
#endif
        if (s == 0u) y_first[i] = sum;
        else y_others[at + (s - 1u) * p.n_embd] = sum;
    }
}

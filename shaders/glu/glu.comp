#version 450
// Gated linear units: y = ACTIVATION(gate, up), row by row.
//
//   binding 0  gate F32 [rows, gate_stride], k values of each row from gate_offset on
//   binding 1  up   F32 [rows, up_stride], k values of each row from up_offset on (gate and up may be halves of one tensor)
//   binding 2  y    F32 or Q8_1 (OUT_Q8_1) [rows, k]
//
// One thread per four values (a quad), counted over all rows; eight threads make a Q8_1 unit.
//
// Defines:
//   ACTIVATION  swiglu, sigmoid_glu, reglu, geglu, geglu_erf, geglu_quick, swiglu_oai
//   WIDTH       4: k, strides and offsets are multiples of 4; 1: any
#define REDUCE_GROUPS OUT_Q8_1
#if OUT_Q8_1
#include "common/reduce.glsl"
#endif
#include "common/sentinel.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint k;
    uint quads;          // quads of an output row; Q8_1 rows have whole units
    uint gate_stride;
    uint up_stride;
    uint gate_offset;
    uint up_offset;
    float alpha;
    float limit;
} p;

#if WIDTH == 4
#define ELEMENT vec4
#else
#define ELEMENT float
#endif
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InGate { ELEMENT gate[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InUp { ELEMENT up[]; };
#if OUT_Q8_1
layout(std430, set = 0, binding = 2) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 2) writeonly buffer OutY { ELEMENT y[]; };
#endif
#include "elementwise/functions.glsl"

float swiglu(float g, float u) { return silu(g) * u; }
float sigmoid_glu(float g, float u) { return sigmoid(g) * u; }
float reglu(float g, float u) { return max(g, 0.0) * u; }
float geglu(float g, float u) { return gelu(g) * u; }
float geglu_erf(float g, float u) { return gelu_erf(g) * u; }
float geglu_quick(float g, float u) { return gelu_quick(g) * u; }
float swiglu_oai(float g, float u) {
    const float x = min(g, p.limit);
    return x * sigmoid(p.alpha * x) * (clamp(u, -p.limit, p.limit) + 1.0);
}

void main() {
    const uint index = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = index / p.quads;
    const uint quad = index - row * p.quads;
    const bool valid = row < p.rows;
    vec4 v = vec4(0.0);
#if WIDTH == 4
    if (valid && 4u * quad < p.k) {
        vec4 g, u;
        SPIN_UNTIL(g = gate[(row * p.gate_stride + p.gate_offset) / 4u + quad], arrived(g));
        SPIN_UNTIL(u = up[(row * p.up_stride + p.up_offset) / 4u + quad], arrived(u));
        for (int c = 0; c < 4; c++) v[c] = ACTIVATION(g[c], u[c]);
    }
#else
    for (uint c = 0u; c < 4u; c++) {
        const uint i = 4u * quad + c;
        float g, u;
        if (valid && i < p.k) {
            SPIN_UNTIL(g = gate[row * p.gate_stride + p.gate_offset + i], arrived(g));
            SPIN_UNTIL(u = up[row * p.up_stride + p.up_offset + i], arrived(u));
            v[c] = ACTIVATION(g, u);
        }
    }
#endif
#if OUT_Q8_1
    const Q8_1Quad packed = q8_1_pack(quad, v);
    if (valid) q8_1_store(row, p.quads / 8u, quad, packed);
#elif WIDTH == 4
    if (valid) y[row * p.quads + quad] = not_sentinel(v);
#else
    for (uint c = 0u; c < 4u; c++) if (valid && 4u * quad + c < p.k) y[row * p.k + 4u * quad + c] = not_sentinel(v[c]);
#endif
}

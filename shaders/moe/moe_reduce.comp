#version 450
// MOE_REDUCE: the weighted sum of the outputs of a token's experts.
// out[t, i] = sum over e of weights[t, e] * y[t, e, i]  [+ residual[t, i]]
//
//   binding 0  y         F32 [n, USED, m], as vectors of WIDTH
//   binding 1  weights   F32 [n, USED]
//   binding 2  out       F32 [n, m]
//   binding 3  residual  F32 [n, m] (HAS_RESIDUAL)
//
// One thread per WIDTH neighbouring outputs of token gl_WorkGroupID.y; it adds the experts in order.
//
// Defines: WG_SIZE USED WIDTH (1 or 4) HAS_RESIDUAL

#extension GL_EXT_control_flow_attributes : require

#if WIDTH == 4
#define Wide vec4
#else
#define Wide float
#endif

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint parts;     // m / WIDTH
} p;

layout(binding = 0) readonly buffer Y { Wide y[]; };
layout(binding = 1) readonly buffer Weights { float weights[]; };
layout(binding = 2) writeonly buffer Out { Wide result[]; };
#if HAS_RESIDUAL
layout(binding = 3) readonly buffer Residual { Wide residual[]; };
#endif

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y;
    if (i >= p.parts) return;
    Wide sum = Wide(0.0);
    [[unroll]] for (uint e = 0; e < USED; e++) sum += weights[token * USED + e] * y[(token * USED + e) * p.parts + i];
#if HAS_RESIDUAL
    sum += residual[token * p.parts + i];
#endif
    result[token * p.parts + i] = sum;
}

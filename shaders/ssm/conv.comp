#version 450
// SSM_CONV: the causal convolution of Mamba-2 and its state. y[t, c] = silu(bias[c] + sum over j of w[c, j] * x[t - (TAPS - 1) + j, c]).
//
// Bindings in this order (STORE 1: x, pos, state):
//   x      F32 [n, stride]: the input is channels p.offset .. p.offset + p.channels of each row
//   w      F32 [channels, TAPS]; [BIAS: bias F32 [channels]]
//   pos    I32 [n]; -1: padding, which is at the end and gives zeros
//   state  F32 [RING, channels] (ssm/taps.glsl)
//   y      F32 [n, channels] (STORE 0)
//
// STORE 0: thread (x, y) computes channel x of token y. STORE 1 runs in a later stage, because the first tokens of other workgroups still need
// the rows that it overwrites: thread (x, y) stores channel x of the input of the y-th last token that is not padding.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint stride;
    uint offset;
    uint channels;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
#if STORE
layout(std430, set = 0, binding = 1) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 2) writeonly buffer State { float state[]; };
#else
layout(std430, set = 0, binding = 1) readonly buffer InW { float w[]; };
#if BIAS
layout(std430, set = 0, binding = 2) readonly buffer InBias { float bias[]; };
#endif
layout(std430, set = 0, binding = 2 + BIAS) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 3 + BIAS) readonly buffer State { float state[]; };
layout(std430, set = 0, binding = 4 + BIAS) writeonly buffer OutY { float y[]; };
#endif

#define CONV_X(token, c) x[(token) * p.stride + p.offset + (c)]
#define CONV_ROW(row, c) state[(row) * p.channels + (c)]
#include "ssm/taps.glsl"

void main() {
    const uint c = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (c >= p.channels) return;
#if STORE
    // Number of tokens before the padding, by binary search.
    uint real = 0u, end = p.n;
    while (real < end) {
        const uint middle = (real + end) / 2u;
        if (pos[middle] >= 0) real = middle + 1u;
        else end = middle;
    }
    const uint last = gl_WorkGroupID.y;
    if (last < real) CONV_ROW(uint(pos[real - 1u - last]) % RING, c) = CONV_X(real - 1u - last, c);
#else
    const uint t = gl_WorkGroupID.y;
    const int at = pos[t];
    float sum = 0.0;
    for (uint back = TAPS - 1u; back > 0u; back--) sum = fma(w[c * TAPS + TAPS - 1u - back], CONV_TAP(t, at, c, back), sum);
    sum = fma(w[c * TAPS + TAPS - 1u], CONV_X(t, c), sum);
#if BIAS
    sum += bias[c];
#endif
    y[t * p.channels + c] = at >= 0 ? silu(sum) : 0.0;
#endif
}

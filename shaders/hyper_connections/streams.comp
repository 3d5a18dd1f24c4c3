#version 450
// Hyper-connections: from the streams to the input of a block (FUNCTION 0, 1), and back (FUNCTION 2, 3).
//
//   FUNCTION 0  y[t, i] = sum over h of streams[t, h, i] * weights[t, h]
//   FUNCTION 1  y[t, i] = scale * sum over h of streams[t, h, i] * sigmoid(gate[t, h, i])
//   FUNCTION 2  y[t, d, i] = x[t, i] * post[t, d] + sum over h of streams[t, h, i] * comb[t, h, d]
//   FUNCTION 3  y[t, d, i] = x[t, i] * post[t, d] + streams[t, d, i]
//   with GATED, 2 * sigmoid(scale * post) takes the place of post
//
//   binding 0  streams F32 [tokens, n_hc, n_embd]
//   binding 1  weights F32 [tokens, n_hc], or gate F32, shape of streams, or post F32 [tokens, n_hc]
//   binding 2  y F32 [tokens, n_embd], or of the shape of streams
//   binding 3  x F32 [tokens, n_embd], for FUNCTION 2 and 3
//   binding 4  comb F32 [tokens, n_hc, n_hc], for FUNCTION 2
//
// One thread per value of y.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint n_embd;
    uint n_hc;
    float scale;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InStreams { float streams[]; };
layout(std430, set = 0, binding = 1) readonly buffer InWeights { float weights[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };
#if FUNCTION >= 2
layout(std430, set = 0, binding = 3) readonly buffer InX { float x[]; };
#endif
#if FUNCTION == 2
layout(std430, set = 0, binding = 4) readonly buffer InComb { float comb[]; };
#endif

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const uint column = i % p.n_embd;
#if FUNCTION < 2
    const uint token = i / p.n_embd;
    float sum = 0.0;
#else
    const uint token = i / p.n_embd / p.n_hc, stream = i / p.n_embd % p.n_hc;
    float post = weights[token * p.n_hc + stream];
#if GATED
    post = 2.0 / (1.0 + exp(-p.scale * post));
#endif
    float sum = x[token * p.n_embd + column] * post;
#endif
#if FUNCTION == 3
    y[i] = sum + streams[i];
#else
    for (uint h = 0u; h < p.n_hc; h++) {
        const uint at = (token * p.n_hc + h) * p.n_embd + column;
#if FUNCTION == 0
        sum += streams[at] * weights[token * p.n_hc + h];
#elif FUNCTION == 1
        sum += streams[at] / (1.0 + exp(-weights[at]));
#else
        sum += streams[at] * comb[(token * p.n_hc + h) * p.n_hc + stream];
#endif
    }
#if FUNCTION == 1
    sum *= p.scale;
#endif
    y[i] = sum;
#endif
}

#version 450
// ggml's SSM_CONV: y[s, t, c] = sum over j of x[s, c, t + j] * w[c, j]. Each sequence comes with the inputs of the tokens before it.
//
//   binding 0  x F32 [sequences, channels, tokens + taps - 1]
//   binding 1  w F32 [channels, taps]
//   binding 2  y F32 [sequences, tokens, channels]
//
// One thread per value.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint sequences;
    uint tokens;
    uint channels;
    uint taps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InW { float w[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.sequences * p.tokens * p.channels) return;
    const uint c = i % p.channels;
    const uint t = i / p.channels % p.tokens;
    const uint row = (i / p.channels / p.tokens * p.channels + c) * (p.tokens + p.taps - 1u) + t;
    float sum = 0.0;
    for (uint j = 0u; j < p.taps; j++) sum += x[row + j] * w[c * p.taps + j];
    y[i] = sum;
}

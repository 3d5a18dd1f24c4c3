#version 450
#extension GL_EXT_control_flow_attributes : require
// ggml's SSM_SCAN: the recurrence of each sequence, token by token.
//
//   state = state * exp(step * a) + b * x * step,  step = log(1 + exp(dt)),  y = sum of state * c
//
//   binding 0  s F32 [sequences, heads, dim, n_state], initial states
//   binding 1  x F32 [sequences, tokens, heads, dim]    binding 2  dt F32 [sequences, tokens, heads]
//   binding 3  a F32 [heads, a_width]: one per head, or one per state of a head
//   binding 4  b F32, binding 5  c F32 [sequences, tokens, groups, n_state]: neighbouring heads share a group
//   binding 6  y F32 [sequences, tokens, heads, dim]
//   binding 7  states after the last token, shape of s; then, up to `snapshots` in all, those after the token before it, and so on
//
// One thread per value of a head's dim. It keeps the n_state states of that value in the first part of binding 7.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint sequences;
    uint tokens;
    uint heads;
    uint dim;
    uint n_state;
    uint groups;
    uint a_width;
    uint snapshots;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InS { float s[]; };
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 2) readonly buffer InDt { float dt[]; };
layout(std430, set = 0, binding = 3) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 4) readonly buffer InB { float b[]; };
layout(std430, set = 0, binding = 5) readonly buffer InC { float c[]; };
layout(std430, set = 0, binding = 6) writeonly buffer OutY { float y[]; };
layout(std430, set = 0, binding = 7) buffer OutS { float after[]; };

const uint STEPS = 8u;    // unrolled by 8: llvmpipe ends an invocation's loops after 65535 passes in all

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.sequences * p.heads * p.dim) return;
    const uint head = i / p.dim % p.heads;
    const uint sequence = i / p.dim / p.heads;
    const uint own = i * p.n_state;
    for (uint n = 0u; n < p.n_state; n++) after[own + n] = s[own + n];
    for (uint t = 0u; t < p.tokens; t++) {
        const uint token = sequence * p.tokens + t;
        const float dt_raw = dt[token * p.heads + head];
        const float step = dt_raw > 20.0 ? dt_raw : log(1.0 + exp(dt_raw));
        const uint at = (token * p.heads + head) * p.dim + i % p.dim;
        const uint group = (token * p.groups + head / (p.heads / p.groups)) * p.n_state;
        const float dt_x = x[at] * step;
        float sum = 0.0;
        for (uint first = 0u; first < p.n_state; first += STEPS) {
            [[unroll]] for (uint u = 0u; u < STEPS; u++) {
                const uint n = first + u;
                if (n >= p.n_state) break;
                const float decay = exp(step * a[head * p.a_width + n % p.a_width]);
                const float state = after[own + n] * decay + b[group + n] * dt_x;
                after[own + n] = state;
                sum += state * c[group + n];
            }
        }
        y[at] = sum;
        const uint back = p.tokens - 1u - t;
        if (back > 0u && back < p.snapshots) {
            const uint kept = back * p.sequences * p.heads * p.dim * p.n_state + own;
            for (uint n = 0u; n < p.n_state; n++) after[kept + n] = after[own + n];
        }
    }
}

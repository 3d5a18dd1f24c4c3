#version 450
#extension GL_EXT_control_flow_attributes : require
// Linear attention as a recurrence. A head has a state S [key, value], updated token by token; w is the decay along the keys:
//
//   FUNCTION 0  RWKV_WKV6          y = r (S + diag(u) k v^T),  S = diag(w) S + k v^T
//   FUNCTION 1  GATED_LINEAR_ATTN  S = diag(w) S + k v^T,  y = scale * r S
//   FUNCTION 2  RWKV_WKV7          S = diag(w) S + k v^T + b (a S),  y = r S
//   FUNCTION 3  GATED_DELTA_NET    S = diag(exp(w)) S,  S = S + beta k (v - k S),  y = scale * r S
//
//   binding 0  y F32 [sequences, tokens, heads, dim]
//   binding 1  states F32 [snapshots, sequences, heads, dim, dim]: after the last token, after the one before it, ...
//   binding 2  initial state F32 [sequences, heads, dim, dim]
//   binding 3  r F32, binding 4  k F32 [sequences, tokens, k_heads, dim]: head h uses head h % k_heads
//   binding 5  v F32 [sequences, tokens, heads, dim]
//   binding 6  w F32 [sequences, tokens, heads, w_width], w_width 1 or dim
//   binding 7  FUNCTION 0: u F32 [heads, dim]; 2: a F32, shape of v; 3: beta F32 [sequences, tokens, heads]
//   binding 8  FUNCTION 2: b F32, shape of v
//
// States are stored as [key, value] for FUNCTION 0 and 1, as [value, key] for 2 and 3. One thread per value of a head;
// it keeps its part of the state in the first snapshot.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint sequences;
    uint tokens;
    uint heads;
    uint k_heads;
    uint dim;
    uint w_width;
    uint snapshots;
    float scale;
} p;

layout(std430, set = 0, binding = 0) writeonly buffer OutY { float y[]; };
layout(std430, set = 0, binding = 1) buffer OutStates { float states[]; };
layout(std430, set = 0, binding = 2) readonly buffer InState { float before[]; };
layout(std430, set = 0, binding = 3) readonly buffer InR { float r[]; };
layout(std430, set = 0, binding = 4) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 5) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 6) readonly buffer InW { float w[]; };
#if FUNCTION == 0
layout(std430, set = 0, binding = 7) readonly buffer InU { float u[]; };
#elif FUNCTION == 2
layout(std430, set = 0, binding = 7) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 8) readonly buffer InB { float b[]; };
#elif FUNCTION == 3
layout(std430, set = 0, binding = 7) readonly buffer InBeta { float beta[]; };
#endif

const uint STEPS = 8u;    // unrolled by 8: llvmpipe ends an invocation's loops after 65535 passes in all

// Index of key n for this thread's value.
uint at(uint n, uint head, uint value) {
#if FUNCTION < 2
    return (head * p.dim + n) * p.dim + value;
#else
    return (head * p.dim + value) * p.dim + n;
#endif
}

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.sequences * p.heads * p.dim) return;
    const uint value = i % p.dim, all_heads = i / p.dim;  // all_heads: the head, counted over all sequences
    const uint head = all_heads % p.heads, sequence = all_heads / p.heads;
    const uint snapshot = p.sequences * p.heads * p.dim * p.dim;
    for (uint n = 0u; n < p.dim; n++) states[at(n, all_heads, value)] = before[at(n, all_heads, value)];
    for (uint t = 0u; t < p.tokens; t++) {
        const uint token = sequence * p.tokens + t;
        const uint row = token * p.heads + head, k_row = (token * p.k_heads + head % p.k_heads) * p.dim;
        float v_in = v[row * p.dim + value];
#if FUNCTION >= 2
        float state_dot = 0.0;  // dot product of the old state with a, or of the decayed state with k
        for (uint first = 0u; first < p.dim; first += STEPS) {
            [[unroll]] for (uint step = 0u; step < STEPS; step++) {
                const uint n = first + step;
                if (n >= p.dim) break;
#if FUNCTION == 2
                state_dot += states[at(n, all_heads, value)] * a[row * p.dim + n];
#else
                state_dot += states[at(n, all_heads, value)] * exp(w[row * p.w_width + n % p.w_width]) * k[k_row + n];
#endif
            }
        }
#if FUNCTION == 3
        v_in = (v_in - state_dot) * beta[row];
#endif
#endif
        float sum = 0.0;
        for (uint first = 0u; first < p.dim; first += STEPS) {
            [[unroll]] for (uint step = 0u; step < STEPS; step++) {
                const uint n = first + step;
                if (n >= p.dim) break;
                const float old = states[at(n, all_heads, value)];
                float decay = w[row * p.w_width + n % p.w_width];
#if FUNCTION == 3
                decay = exp(decay);
#endif
                const float update = k[k_row + n] * v_in;
                float state = old * decay + update;
#if FUNCTION == 0
                sum += (old + u[head * p.dim + n] * update) * r[k_row + n];
#elif FUNCTION == 2
                state += b[row * p.dim + n] * state_dot;
#endif
#if FUNCTION > 0
                sum += state * r[k_row + n];
#endif
                states[at(n, all_heads, value)] = state;
            }
        }
        y[row * p.dim + value] = sum * p.scale;
        const uint back = p.tokens - 1u - t;
        if (back > 0u && back < p.snapshots) {
            for (uint n = 0u; n < p.dim; n++) states[back * snapshot + at(n, all_heads, value)] = states[at(n, all_heads, value)];
        }
    }
}

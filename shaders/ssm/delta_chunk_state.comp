#version 450
// DELTA_NET in chunks of CHUNK tokens, second part: the state goes from chunk to chunk, and leaves y, by products of small matrices.
//
// With T, B and the factors of ssm/delta_chunk_ut.comp, S the state before the chunk, and of each token
//
//   x = v - D S k        u = T x        y = D S q + B x        S = (decays of the chunk) S + sum of u (decays after the token) k^T
//
// Head h has DIM rows of the state; rows do not depend on each other. A workgroup has ROWS of them.
//
//   binding 0  qkv F32 [n, CHANNELS]; CHANNELS and DIM multiples of 4
//   binding 1  matrices F32 [chunks, N_HEAD, 2 CHUNK, CHUNK]     2  factors F32 [chunks, N_HEAD, CHUNK, 4]
//   binding 3  pos I32 [n]     4  state F32 [SLOTS, N_HEAD, DIM, KEY]: as in ssm/delta_net.comp
//   binding 5  y F32 [n, N_HEAD * DIM]
//
// In the products over keys and over tokens a thread has TOKENS tokens, CHUNK / TOKENS apart, and four rows of the state. Their left
// factors, k above q and T above B, come through shared memory in slices of SLICE quads, the next one being read meanwhile. In the product
// that makes the next state a thread has EACH times four rows and a quad of keys; these sums are the state, in registers, and shared memory
// has a copy.
#extension GL_EXT_control_flow_attributes : require

#ifndef SLOTS
#define SLOTS 2
#endif

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
} p;

#include "ssm/softplus.glsl"
#include "ssm/delta_heads.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InQkv { vec4 qkv[]; };
layout(std430, set = 0, binding = 1) readonly buffer InMatrices { vec4 matrices[]; };
layout(std430, set = 0, binding = 2) readonly buffer InFactors { vec4 factors[]; };
layout(std430, set = 0, binding = 3) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 4) buffer States { vec4 states[]; };
layout(std430, set = 0, binding = 5) writeonly buffer OutY { vec4 y[]; };

#define ACROSS (ROWS / 4)                                 // threads side by side
#define DOWN (CHUNK / TOKENS)                             // threads below each other; WG_SIZE is ACROSS * DOWN
#define PITCH (SLICE + 1)                                 // of a slice, in quads: rows begin in different banks
#define KEY_SLICES ((QUADS + SLICE - 1) / SLICE)
#define SLICES (KEY_SLICES + CHUNK / 4 / SLICE)           // of a chunk: of k and q, then of T and B
#define STATE_PITCH (KEY_SLICES * SLICE + 1)
#define FETCH ((2 * CHUNK * SLICE + WG_SIZE - 1) / WG_SIZE)
#define PARTS (ACROSS * QUADS)                            // of the state, four rows of a quad each
#define EACH ((PARTS + WG_SIZE - 1) / WG_SIZE)

// Row r of the state is row r % 4 * ACROSS + r / 4 of its copy: threads side by side read from different banks.
shared vec4 copy[ROWS * STATE_PITCH];
shared vec4 pool[2 * CHUNK * PITCH];  // a slice; between chunks u, [CHUNK, ACROSS]
shared vec4 rest[CHUNK * ACROSS];     // x
shared int last;

void main() {
    const uint tid = gl_LocalInvocationIndex, tx = tid % ACROSS, ty = tid / ACROSS;
    const uint head = gl_WorkGroupID.y, row0 = gl_WorkGroupID.x * ROWS;
    const uint group_at = GROUP_OF(head) * QUADS, row_quad = min(row0 / 4u + tx, DIM / 4 - 1u);
    const bool inside = row0 / 4u + tx < DIM / 4;

    const int first = pos[0];
    const uint slot = N_HEAD * DIM * QUADS, head_at = head * DIM * QUADS;
    for (uint i = tid; i < ROWS * STATE_PITCH; i += WG_SIZE) copy[i] = vec4(0.0);
    if (tid == 0u) last = -1;
    barrier();
    vec4 state[EACH][4];
    [[unroll]] for (uint e = 0; e < EACH; e++) {
        const uint part = e * WG_SIZE + tid, quad = part % QUADS, row = part / QUADS * 4u;
        [[unroll]] for (uint j = 0; j < 4; j++) {
            const bool real = part < PARTS && row0 + row < DIM;
            state[e][j] = first > 0 && real ? states[uint(first - 1) % SLOTS * slot + head_at + (row0 + row + j) * QUADS + quad] : vec4(0.0);
            if (part < PARTS) copy[(j * ACROSS + row / 4u) * STATE_PITCH + quad] = state[e][j];
        }
    }

    const uint chunks = (p.n + CHUNK - 1u) / CHUNK;
    int seen_last = -1;
    vec4 next[FETCH];

// What this thread brings of a slice of a chunk.
#define BRING(chunk, slice)                                                                                                              \
    [[unroll]] for (uint f = 0; f < FETCH; f++) {                                                                                        \
        const uint i = f * WG_SIZE + tid, row = i / SLICE, quad = (slice) * SLICE + i % SLICE;                                           \
        const uint token = min((chunk) * CHUNK + row % CHUNK, p.n - 1u);                                                                 \
        next[f] = vec4(0.0);                                                                                                             \
        if (2 * CHUNK * SLICE % WG_SIZE == 0 || i < 2 * CHUNK * SLICE) {                                                                 \
            if ((slice) >= KEY_SLICES) {                                                                                                 \
                next[f] = matrices[(((chunk) * N_HEAD + head) * 2 * CHUNK + row) * (CHUNK / 4) + quad - KEY_SLICES * SLICE];             \
            } else if (QUADS % SLICE == 0 || quad < QUADS) {                                                                             \
                next[f] = qkv[token * (CHANNELS / 4) + (row < CHUNK ? N_GROUP * QUADS : 0) + group_at + quad];                           \
            }                                                                                                                            \
        }                                                                                                                                \
    }

#define PUT()                                                                                                                            \
    barrier();                                                                                                                           \
    [[unroll]] for (uint f = 0; f < FETCH; f++) {                                                                                        \
        const uint i = f * WG_SIZE + tid;                                                                                                \
        if (2 * CHUNK * SLICE % WG_SIZE == 0 || i < 2 * CHUNK * SLICE) pool[i / SLICE * PITCH + i % SLICE] = next[f];                    \
    }                                                                                                                                    \
    barrier();

    BRING(0u, 0u)
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        vec4 factor[TOKENS], v[TOKENS], found[TOKENS], seen[TOKENS];
        [[unroll]] for (uint m = 0; m < TOKENS; m++) {
            const uint t = m * DOWN + ty, token = min(chunk * CHUNK + t, p.n - 1u);
            factor[m] = factors[(chunk * N_HEAD + head) * CHUNK + t];
            v[m] = qkv[token * (CHANNELS / 4) + 2 * N_GROUP * QUADS + head * (DIM / 4) + row_quad];
            seen_last = max(seen_last, pos[token]);
            found[m] = seen[m] = vec4(0.0);
        }
        for (uint slice = 0u; slice < KEY_SLICES; slice++) {
            PUT()
            BRING(chunk, slice + 1u)
            [[unroll]] for (uint quad = 0; quad < SLICE; quad++) {
                vec4 s[4];
                [[unroll]] for (uint j = 0; j < 4; j++) s[j] = copy[(j * ACROSS + tx) * STATE_PITCH + slice * SLICE + quad];
                [[unroll]] for (uint m = 0; m < TOKENS; m++) {
                    const vec4 k = pool[(m * DOWN + ty) * PITCH + quad], q = pool[(CHUNK + m * DOWN + ty) * PITCH + quad];
                    [[unroll]] for (uint j = 0; j < 4; j++) {
                        found[m][j] = fma(k.x, s[j].x, fma(k.y, s[j].y, fma(k.z, s[j].z, fma(k.w, s[j].w, found[m][j]))));
                        seen[m][j] = fma(q.x, s[j].x, fma(q.y, s[j].y, fma(q.z, s[j].z, fma(q.w, s[j].w, seen[m][j]))));
                    }
                }
            }
        }
        [[unroll]] for (uint m = 0; m < TOKENS; m++) {
            rest[(m * DOWN + ty) * ACROSS + tx] = v[m] - factor[m].x * found[m];
            found[m] = vec4(0.0);  // from here on u
            seen[m] *= factor[m].y;
        }
        for (uint slice = 0u; slice < CHUNK / 4 / SLICE; slice++) {
            PUT()
            if (slice + 1u < CHUNK / 4 / SLICE) {
                BRING(chunk, KEY_SLICES + slice + 1u)
            } else if (chunk + 1u < chunks) {
                BRING(chunk + 1u, 0u)
            }
            [[unroll]] for (uint quad = 0; quad < SLICE; quad++) {
                vec4 x[4];
                [[unroll]] for (uint j = 0; j < 4; j++) x[j] = rest[(4u * (slice * SLICE + quad) + j) * ACROSS + tx];
                [[unroll]] for (uint m = 0; m < TOKENS; m++) {
                    const vec4 row = pool[(m * DOWN + ty) * PITCH + quad], out_row = pool[(CHUNK + m * DOWN + ty) * PITCH + quad];
                    found[m] = fma(vec4(row.x), x[0], fma(vec4(row.y), x[1], fma(vec4(row.z), x[2], fma(vec4(row.w), x[3], found[m]))));
                    seen[m] = fma(vec4(out_row.x), x[0],
                                  fma(vec4(out_row.y), x[1], fma(vec4(out_row.z), x[2], fma(vec4(out_row.w), x[3], seen[m]))));
                }
            }
        }
        barrier();
        [[unroll]] for (uint m = 0; m < TOKENS; m++) {
            const uint t = m * DOWN + ty, token = chunk * CHUNK + t;
            pool[t * ACROSS + tx] = found[m] * factor[m].z;
            if (inside && token < p.n) y[token * (INNER / 4) + head * (DIM / 4) + row_quad] = seen[m];
        }
        barrier();
        [[unroll]] for (uint e = 0; e < EACH; e++)
            [[unroll]] for (uint j = 0; j < 4; j++) state[e][j] *= factor[0].w;
        for (uint t0 = 0u; t0 < CHUNK; t0 += 8u) {
            [[unroll]] for (uint t1 = 0; t1 < 8; t1++) {
                const uint t = t0 + t1, key_at = min(chunk * CHUNK + t, p.n - 1u) * (CHANNELS / 4) + N_GROUP * QUADS + group_at;
                vec4 k = vec4(0.0);
                [[unroll]] for (uint e = 0; e < EACH; e++) {
                    const uint part = e * WG_SIZE + tid;
                    if (e == 0 || WG_SIZE % QUADS != 0) k = qkv[key_at + part % QUADS];
                    const vec4 u = pool[t * ACROSS + min(part / QUADS, ACROSS - 1)];
                    [[unroll]] for (uint j = 0; j < 4; j++) state[e][j] = fma(vec4(u[j]), k, state[e][j]);
                }
            }
        }
        [[unroll]] for (uint e = 0; e < EACH; e++) {
            const uint part = e * WG_SIZE + tid;
            [[unroll]] for (uint j = 0; j < 4; j++)
                if (PARTS % WG_SIZE == 0 || part < PARTS) copy[(j * ACROSS + part / QUADS) * STATE_PITCH + part % QUADS] = state[e][j];
        }
    }

    atomicMax(last, seen_last);
    barrier();
    const int end = last;
    if (end >= 0) [[unroll]] for (uint e = 0; e < EACH; e++) {
        const uint part = e * WG_SIZE + tid, quad = part % QUADS, row = part / QUADS * 4u;
        if (part < PARTS && row0 + row < DIM) [[unroll]] for (uint j = 0; j < 4; j++)
            states[uint(end) % SLOTS * slot + head_at + (row0 + row + j) * QUADS + quad] = state[e][j];
    }
}

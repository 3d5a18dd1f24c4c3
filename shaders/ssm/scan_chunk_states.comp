#version 450
// SSM_SCAN in chunks of CHUNK tokens, the states between chunks. With S the state of a head before a chunk, the one after it is
//
//   S = (decays of the chunk) S + sum of (decays after token i) dt[i] x[i] B[i]^T over i
//
// Nothing is read out of it here (ssm/scan_chunk_output.comp does), so each value of a state is by itself, and workgroups share a head by
// rows and by columns. The state before each chunk is stored for that kernel. Decays after a token are products of decays, all at most 1, as
// the state's own are: none overflows, and no difference of large sums of logarithms rounds a small one away.
//
//   binding 0  xbc F32 [n, CHANNELS], of which x and B are read; HEAD_DIM and STATE multiples of 4
//   binding 1  zx F32 [n, stride], of which dt is read     2  a F32 [N_HEAD]     3  dt_bias F32 [N_HEAD]     4  pos I32 [n]
//   binding 5  state F32 [SLOTS, N_HEAD, HEAD_DIM, STATE]: as in ssm/scan.comp
//   binding 6  before F32 [chunks, N_HEAD, HEAD_DIM, STATE]: the state before each chunk that has a token
//
// A workgroup has ROWS rows and COLUMNS columns of a head. A thread has four rows and EACH quads of columns, ACROSS quads apart, in registers
// for all chunks. x times its factor and B come through shared memory, SLICE tokens at a time.
#extension GL_EXT_control_flow_attributes : require

#ifndef SLOTS
#define SLOTS 2
#endif

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint stride;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InXbc { vec4 xbc[]; };
layout(std430, set = 0, binding = 1) readonly buffer InZx { float zx[]; };
layout(std430, set = 0, binding = 2) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 3) readonly buffer InDtBias { float dt_bias[]; };
layout(std430, set = 0, binding = 4) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 5) buffer States { vec4 states[]; };
layout(std430, set = 0, binding = 6) writeonly buffer OutBefore { vec4 before[]; };

#include "ssm/softplus.glsl"
#include "ssm/scan_steps.glsl"

#define ACROSS (COLUMNS / 4 / EACH)                       // threads side by side; WG_SIZE is ACROSS * ROWS / 4
#define BLOCKS ((STATE + COLUMNS - 1) / COLUMNS)          // workgroups that share rows

shared vec4 tile_x[SLICE][ROWS / 4], tile_b[SLICE][COLUMNS / 4];
shared float factors[CHUNK];
shared float chunk_decay;

void main() {
    const uint tid = gl_LocalInvocationIndex, tx = tid % ACROSS, ty = tid / ACROSS;
    const uint head = gl_WorkGroupID.y;
    const uint row_quad0 = gl_WorkGroupID.x / BLOCKS * (ROWS / 4), quad0 = gl_WorkGroupID.x % BLOCKS * (COLUMNS / 4);
    const uint b_at = B_AT(GROUP_OF(head)), x_at = head * (HEAD_DIM / 4);
    const uint row0 = 4u * (row_quad0 + ty);

    // Tokens before the padding, by binary search.
    uint real = 0u, end = p.n;
    while (real < end) {
        const uint middle = (real + end) / 2u;
        if (pos[middle] >= 0) real = middle + 1u;
        else end = middle;
    }
    if (real == 0u) return;

    const int first = pos[0];
    const uint slot = N_HEAD * HEAD_DIM * QUADS;
// Where row row0 + j and quad e of this thread lie in a state.
#define PLACE(j, e) ((head * HEAD_DIM + row0 + (j)) * QUADS + quad0 + (e) * ACROSS + tx)
#define INSIDE(e) (row0 < HEAD_DIM && quad0 + (e) * ACROSS + tx < QUADS)
    vec4 state[EACH][4];
    [[unroll]] for (uint e = 0; e < EACH; e++)
        [[unroll]] for (uint j = 0; j < 4; j++)
            state[e][j] = first > 0 && INSIDE(e) ? states[uint(first - 1) % SLOTS * slot + PLACE(j, e)] : vec4(0.0);

    for (uint chunk = 0u; chunk * CHUNK < real; chunk++) {
        [[unroll]] for (uint e = 0; e < EACH; e++)
            if (INSIDE(e)) [[unroll]] for (uint j = 0; j < 4; j++) before[chunk * slot + PLACE(j, e)] = state[e][j];
        barrier();
        BRING_STEPS(chunk, head)
        barrier();
        for (uint i = tid; i < CHUNK; i += WG_SIZE) {
            float after = 1.0;
            for (uint t = i + 1u; t < CHUNK; t++) after *= decays[t];
            factors[i] = after * steps[i];
            if (i == 0u) chunk_decay = after * decays[0];
        }
        barrier();
        [[unroll]] for (uint e = 0; e < EACH; e++)
            [[unroll]] for (uint j = 0; j < 4; j++) state[e][j] *= chunk_decay;
        for (uint t0 = 0u; t0 < CHUNK; t0 += SLICE) {
            if (t0 > 0u) barrier();
            for (uint i = tid; i < SLICE * (ROWS / 4); i += WG_SIZE) {
                const uint t = i / (ROWS / 4), quad = min(row_quad0 + i % (ROWS / 4), HEAD_DIM / 4 - 1u);
                const uint token = min(chunk * CHUNK + t0 + t, p.n - 1u);
                tile_x[t][i % (ROWS / 4)] = factors[t0 + t] * xbc[token * ROW_QUADS + x_at + quad];
            }
            for (uint i = tid; i < SLICE * (COLUMNS / 4); i += WG_SIZE) {
                const uint t = i / (COLUMNS / 4), quad = min(quad0 + i % (COLUMNS / 4), QUADS - 1u);
                const uint token = min(chunk * CHUNK + t0 + t, p.n - 1u);
                tile_b[t][i % (COLUMNS / 4)] = xbc[token * ROW_QUADS + b_at + quad];
            }
            barrier();
            [[unroll]] for (uint t = 0; t < SLICE; t++) {
                const vec4 x = tile_x[t][ty];
                [[unroll]] for (uint e = 0; e < EACH; e++) {
                    const vec4 b = tile_b[t][e * ACROSS + tx];
                    [[unroll]] for (uint j = 0; j < 4; j++) state[e][j] = fma(vec4(x[j]), b, state[e][j]);
                }
            }
        }
    }

    [[unroll]] for (uint e = 0; e < EACH; e++)
        if (INSIDE(e)) [[unroll]] for (uint j = 0; j < 4; j++) states[uint(pos[real - 1u]) % SLOTS * slot + PLACE(j, e)] = state[e][j];
}

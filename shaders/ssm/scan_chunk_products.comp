#version 450
// SSM_SCAN in chunks of CHUNK tokens, the products of C and B: products[t, i] = C[t] . B[i] of all tokens t and i of a chunk, of each group.
// Heads of a group share them, and they depend on no state. See ssm/scan_chunk_output.comp, which reads those with i <= t.
//
//   binding 0  xbc F32 [n, CHANNELS], of which C and B are read
//   binding 1  products F32 [chunks, N_GROUP, CHUNK, CHUNK]
//
// A workgroup has a chunk of a group. A thread has TOKENS rows, CHUNK / TOKENS apart, and four columns, CHUNK / 4 apart; slices of SLICE quads
// of C and B come through shared memory.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InXbc { vec4 xbc[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutProducts { float products[]; };

#define INNER (N_HEAD * HEAD_DIM)
#define QUADS (STATE / 4)
#define ROW_QUADS ((INNER + 2 * N_GROUP * STATE) / 4)  // of xbc
#define ACROSS (CHUNK / 4)      // threads side by side
#define DOWN (CHUNK / TOKENS)   // threads below each other; WG_SIZE is ACROSS * DOWN
#define PITCH (SLICE + 1)       // of a slice, in quads: rows begin in different banks

shared vec4 slices[2 * CHUNK * PITCH];  // of C, then of B

void main() {
    const uint tid = gl_LocalInvocationIndex, tx = tid % ACROSS, ty = tid / ACROSS;
    const uint t0 = gl_WorkGroupID.x * CHUNK, group = gl_WorkGroupID.y;

    float sums[TOKENS][4];
    [[unroll]] for (uint m = 0; m < TOKENS; m++)
        [[unroll]] for (uint j = 0; j < 4; j++) sums[m][j] = 0.0;

    for (uint quad0 = 0u; quad0 < QUADS; quad0 += SLICE) {
        barrier();
        for (uint i = tid; i < 2 * CHUNK * SLICE; i += WG_SIZE) {
            const uint row = i / SLICE, quad = quad0 + i % SLICE;
            const uint from = INNER / 4 + (row < CHUNK ? N_GROUP + group : group) * QUADS + quad;
            slices[row * PITCH + i % SLICE] = quad < QUADS ? xbc[min(t0 + row % CHUNK, p.n - 1u) * ROW_QUADS + from] : vec4(0.0);
        }
        barrier();
        [[unroll]] for (uint quad = 0; quad < SLICE; quad++) {
            vec4 b[4];
            [[unroll]] for (uint j = 0; j < 4; j++) b[j] = slices[(CHUNK + j * ACROSS + tx) * PITCH + quad];
            [[unroll]] for (uint m = 0; m < TOKENS; m++) {
                const vec4 c = slices[(m * DOWN + ty) * PITCH + quad];
                [[unroll]] for (uint j = 0; j < 4; j++)
                    sums[m][j] = fma(c.x, b[j].x, fma(c.y, b[j].y, fma(c.z, b[j].z, fma(c.w, b[j].w, sums[m][j]))));
            }
        }
    }

    const uint at = (gl_WorkGroupID.x * N_GROUP + group) * CHUNK;
    [[unroll]] for (uint m = 0; m < TOKENS; m++)
        [[unroll]] for (uint j = 0; j < 4; j++) products[(at + m * DOWN + ty) * CHUNK + j * ACROSS + tx] = sums[m][j];
}

#version 450
// SSM_SCAN in chunks of CHUNK tokens, the outputs. With D[t, i] the product of the decays of tokens i + 1 .. t of a chunk, and S the state of
// a head before it, the state after token t is D[t, -1] S + sum of D[t, i] dt[i] x[i] B[i]^T over i <= t. So what C reads out of it is
//
//   y[t] = D[t, -1] S C[t] + sum of D[t, i] dt[i] (C[t] . B[i]) x[i] over i <= t
//
// two products of matrices, and the op's result (y[t] + d x[t]) silu(z[t]). D runs down a column as a product of decays, as the state's own
// does: none overflows, and no difference of sums rounds. Source: state-space duality (arXiv 2405.21060).
//
//   binding 0  xbc F32 [n, CHANNELS], of which x and C are read; HEAD_DIM and STATE multiples of 4
//   binding 1  zx F32 [n, stride], of which z and dt are read
//   binding 2  a F32 [N_HEAD]     3  d F32 [N_HEAD]     4  dt_bias F32 [N_HEAD]     5  pos I32 [n]
//   binding 6  products F32 [chunks, N_GROUP, CHUNK, CHUNK] (ssm/scan_chunk_products.comp)
//   binding 7  before F32 [chunks, N_HEAD, HEAD_DIM, STATE] (ssm/scan_chunk_states.comp)
//   binding 8  y F32 [n, N_HEAD * HEAD_DIM]; padding gives zeros
//
// A workgroup has ROWS rows of a head for a chunk. A thread has TOKENS neighbouring tokens and four rows. C and S come through shared memory
// in slices of SLICE quads; their place is taken by the matrix of the second product.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint stride;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InXbc { vec4 xbc[]; };
layout(std430, set = 0, binding = 1) readonly buffer InZx { float zx[]; };
layout(std430, set = 0, binding = 2) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 3) readonly buffer InD { float d[]; };
layout(std430, set = 0, binding = 4) readonly buffer InDtBias { float dt_bias[]; };
layout(std430, set = 0, binding = 5) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 6) readonly buffer InProducts { float products[]; };
layout(std430, set = 0, binding = 7) readonly buffer InBefore { vec4 before[]; };
layout(std430, set = 0, binding = 8) writeonly buffer OutY { vec4 y[]; };

#include "ssm/softplus.glsl"
#include "ssm/scan_steps.glsl"

#define ACROSS (ROWS / 4)                 // threads side by side; WG_SIZE is ACROSS * CHUNK / TOKENS
#define PITCH (SLICE + 1)                 // of a slice, in quads: rows begin in different banks
#define ROW (CHUNK / 4 + 1)               // of the matrix
#define PARTS (WG_SIZE / CHUNK)           // threads that share a column of the matrix as it is made
#define SLICES ((CHUNK + ROWS) * PITCH)
#define MATRIX (CHUNK * ROW)

shared vec4 pool[SLICES > MATRIX ? SLICES : MATRIX];  // slices of C, then of S; afterwards the matrix
shared vec4 tile_x[CHUNK * ACROSS];
shared float from_start[CHUNK];  // decays from the chunk's start to a token, its own included

float silu(float v) { return v / (1.0 + exp(min(-v, 88.0))); }

void main() {
    const uint tid = gl_LocalInvocationIndex, tx = tid % ACROSS, ty = tid / ACROSS;
    const uint row_quad0 = gl_WorkGroupID.x * ACROSS, head = gl_WorkGroupID.y, chunk = gl_WorkGroupID.z, t0 = chunk * CHUNK;
    const uint c_at = C_AT(GROUP_OF(head)), x_at = head * (HEAD_DIM / 4);

    BRING_STEPS(chunk, head)
    for (uint i = tid; i < CHUNK * ACROSS; i += WG_SIZE) {
        const uint quad = min(row_quad0 + i % ACROSS, HEAD_DIM / 4 - 1u);
        tile_x[i] = xbc[min(t0 + i / ACROSS, p.n - 1u) * ROW_QUADS + x_at + quad];
    }

    // S C. Row r of S waits in row r % 4 * ACROSS + r / 4 of its slice: threads side by side read from different banks.
    vec4 sums[TOKENS];
    [[unroll]] for (uint m = 0; m < TOKENS; m++) sums[m] = vec4(0.0);
    for (uint quad0 = 0u; quad0 < QUADS; quad0 += SLICE) {
        barrier();
        for (uint i = tid; i < (CHUNK + ROWS) * SLICE; i += WG_SIZE) {
            const uint row = i / SLICE, quad = quad0 + i % SLICE;
            vec4 v = vec4(0.0);
            uint to = row;
            if (row < CHUNK) {
                if (quad < QUADS) v = xbc[min(t0 + row, p.n - 1u) * ROW_QUADS + c_at + quad];
            } else {
                const uint of_head = 4u * row_quad0 + (row - CHUNK);
                if (quad < QUADS && of_head < HEAD_DIM) v = before[((chunk * N_HEAD + head) * HEAD_DIM + of_head) * QUADS + quad];
                to = CHUNK + (row - CHUNK) % 4u * ACROSS + (row - CHUNK) / 4u;
            }
            pool[to * PITCH + i % SLICE] = v;
        }
        barrier();
        [[unroll]] for (uint quad = 0; quad < SLICE; quad++) {
            vec4 s[4];
            [[unroll]] for (uint j = 0; j < 4; j++) s[j] = pool[(CHUNK + j * ACROSS + tx) * PITCH + quad];
            [[unroll]] for (uint m = 0; m < TOKENS; m++) {
                const vec4 c = pool[(ty * TOKENS + m) * PITCH + quad];
                [[unroll]] for (uint j = 0; j < 4; j++)
                    sums[m][j] = fma(c.x, s[j].x, fma(c.y, s[j].y, fma(c.z, s[j].z, fma(c.w, s[j].w, sums[m][j]))));
            }
        }
    }
    barrier();

    // The matrix: a thread goes down a part of a column.
    {
        const uint rows = CHUNK / PARTS, i = tid % CHUNK, from = tid / CHUNK * rows;
        const uint products_at = (chunk * N_GROUP + GROUP_OF(head)) * CHUNK;
        float decay = 1.0;
        for (uint t = i + 1u; t < from; t++) decay *= decays[t];
        for (uint t = from; t < from + rows; t++) {
            if (t > i) decay *= decays[t];
            pool[t * ROW + i / 4u][i % 4u] = t >= i ? decay * steps[i] * products[(products_at + t) * CHUNK + i] : 0.0;
            if (i == 0u) from_start[t] = decay * decays[0];
        }
    }
    barrier();

    [[unroll]] for (uint m = 0; m < TOKENS; m++) sums[m] *= from_start[ty * TOKENS + m];
    const uint last_quad = (ty * TOKENS + TOKENS - 1u) / 4u;  // behind it are the zeros of later tokens
    for (uint quad = 0u; quad <= last_quad; quad++) {
        vec4 x[4];
        [[unroll]] for (uint j = 0; j < 4; j++) x[j] = tile_x[(4u * quad + j) * ACROSS + tx];
        [[unroll]] for (uint m = 0; m < TOKENS; m++) {
            const vec4 row = pool[(ty * TOKENS + m) * ROW + quad];
            sums[m] = fma(vec4(row.x), x[0], fma(vec4(row.y), x[1], fma(vec4(row.z), x[2], fma(vec4(row.w), x[3], sums[m]))));
        }
    }

    if (row_quad0 + tx >= HEAD_DIM / 4) return;
    [[unroll]] for (uint m = 0; m < TOKENS; m++) {
        const uint t = ty * TOKENS + m, token = t0 + t, y_at = x_at + row_quad0 + tx;
        if (token >= p.n) break;
        vec4 made = vec4(0.0);
        if (pos[token] >= 0) {
            made = fma(vec4(d[head]), tile_x[t * ACROSS + tx], sums[m]);
            [[unroll]] for (uint j = 0; j < 4; j++) made[j] *= silu(zx[token * p.stride + 4u * y_at + j]);
        }
        y[token * (INNER / 4) + y_at] = made;
    }
}

#version 450
// DELTA_NET in chunks of CHUNK tokens, first part: the matrices of each chunk and head that do not depend on the state (UT transform).
//
// With q and k of length 1 (q times KEY^-0.5 as well), D[t, i] the product of the decays of tokens i + 1 .. t, u[t] what token t adds to the
// state (S = D S + u k^T), and S the state before the chunk:
//
//   u[t] = share[t] (v[t] - D[t, -1] S k[t] - sum of D[t, i] (k[t] . k[i]) u[i] over i < t)
//   y[t] = D[t, -1] S q[t] + sum of D[t, i] (q[t] . k[i]) u[i] over i <= t
//
// so (I + L) u = share (v - D S k) with L[t, i] = share[t] D[t, i] (k[t] . k[i]) below the diagonal. Stored are, both lower triangular,
//
//   T = (I + L)^-1 times share, column by column        B[t, i] = sum of D[t, s] (q[t] . k[s]) T[s, i] over s
//
// D runs down a column as a product of decays, as the state's own does: one that is 0 in f32 is 0 here, and no difference of sums rounds.
// Tokens past the end of the batch count as padding: decay 1, share 0, rows of zeros.
//
//   binding 0  qkv F32 [n, CHANNELS]; CHANNELS a multiple of 4
//   binding 1  alpha F32 [n, N_HEAD]     2  beta F32 [n, N_HEAD]     3  a F32 [N_HEAD]     4  dt_bias F32 [N_HEAD]     5  pos I32 [n]
//   binding 6  matrices F32 [chunks, N_HEAD, 2 CHUNK, CHUNK]: T, then B
//   binding 7  factors F32 [chunks, N_HEAD, CHUNK, 4]: by what S times the k of qkv counts as D[t, -1] S k, the same for q, by what the k of qkv
//              is multiplied to be k times the decays from t to the chunk's end, and all decays of the chunk
//
// A workgroup has a chunk of a head. In the products of q and k a thread has TOKENS rows of k and q, CHUNK / TOKENS apart, and four columns;
// slices of SLICE quads of each row come through shared memory.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    float length_eps;
    float q_scale;
} p;

#include "ssm/softplus.glsl"
#include "ssm/delta_heads.glsl"

layout(std430, set = 0, binding = 0) readonly buffer InQkv { vec4 qkv[]; };
layout(std430, set = 0, binding = 1) readonly buffer InAlpha { float alpha[]; };
layout(std430, set = 0, binding = 2) readonly buffer InBeta { float beta[]; };
layout(std430, set = 0, binding = 3) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 4) readonly buffer InDtBias { float dt_bias[]; };
layout(std430, set = 0, binding = 5) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = 6) writeonly buffer OutMatrices { vec4 matrices[]; };
layout(std430, set = 0, binding = 7) writeonly buffer OutFactors { vec4 factors[]; };

#define ACROSS (CHUNK / 4)         // threads side by side, and quads of a row of a matrix
#define DOWN (CHUNK / TOKENS)      // threads below each other; WG_SIZE is ACROSS * DOWN
#define PITCH (SLICE + 1)          // of a slice, in quads: rows begin in different banks
#define ROW (ACROSS + 1)           // of a matrix
#define BLOCK (CHUNK < 16 ? CHUNK : 16)

// First slices of the rows of k, then of q; afterwards L, which becomes T, and the products of q and k times D.
#define POOL (PITCH > ROW ? 2 * CHUNK * PITCH : 2 * CHUNK * ROW)
shared vec4 pool[POOL];
shared float decay[CHUNK], share[CHUNK], k_unit[CHUNK], q_unit[CHUNK], before[CHUNK], after[CHUNK], squares[CHUNK];

#define L(t, i) pool[(t) * ROW + (i) / 4u][(i) % 4u]
#define A(t, i) pool[(CHUNK + (t)) * ROW + (i) / 4u][(i) % 4u]

void main() {
    const uint tid = gl_LocalInvocationIndex, tx = tid % ACROSS, ty = tid / ACROSS;
    const uint head = gl_WorkGroupID.y, t0 = gl_WorkGroupID.x * CHUNK;
    const uint at = gl_WorkGroupID.x * N_HEAD + head;
    const uint group_at = GROUP_OF(head) * QUADS;

    // k . k and q . k.
    float kk[TOKENS][4], qk[TOKENS][4], qq[TOKENS];
    [[unroll]] for (uint m = 0; m < TOKENS; m++) {
        qq[m] = 0.0;
        [[unroll]] for (uint j = 0; j < 4; j++) kk[m][j] = qk[m][j] = 0.0;
    }
    for (uint quad0 = 0u; quad0 < QUADS; quad0 += SLICE) {
        barrier();
        [[unroll]] for (uint i0 = 0; i0 < 2 * CHUNK * SLICE; i0 += WG_SIZE) {
            const uint i = i0 + tid, row = i / SLICE, quad = quad0 + i % SLICE;
            const uint from = min(t0 + row % CHUNK, p.n - 1u) * (CHANNELS / 4) + (row < CHUNK ? N_GROUP * QUADS : 0) + group_at;
            if (i < 2 * CHUNK * SLICE) pool[row * PITCH + i % SLICE] = quad < QUADS ? qkv[from + quad] : vec4(0.0);
        }
        barrier();
        [[unroll]] for (uint quad = 0; quad < SLICE; quad++) {
            vec4 key[4];
            [[unroll]] for (uint j = 0; j < 4; j++) key[j] = pool[(j * ACROSS + tx) * PITCH + quad];
            [[unroll]] for (uint m = 0; m < TOKENS; m++) {
                const vec4 k = pool[(m * DOWN + ty) * PITCH + quad], q = pool[(CHUNK + m * DOWN + ty) * PITCH + quad];
                qq[m] = fma(q.x, q.x, fma(q.y, q.y, fma(q.z, q.z, fma(q.w, q.w, qq[m]))));
                [[unroll]] for (uint j = 0; j < 4; j++) {
                    kk[m][j] = fma(k.x, key[j].x, fma(k.y, key[j].y, fma(k.z, key[j].z, fma(k.w, key[j].w, kk[m][j]))));
                    qk[m][j] = fma(q.x, key[j].x, fma(q.y, key[j].y, fma(q.z, key[j].z, fma(q.w, key[j].w, qk[m][j]))));
                }
            }
        }
    }
    barrier();
    [[unroll]] for (uint m = 0; m < TOKENS; m++) {
        const uint t = m * DOWN + ty;
        if (tx == 0u) q_unit[t] = qq[m];
        [[unroll]] for (uint j = 0; j < 4; j++) {
            const uint i = j * ACROSS + tx;
            L(t, i) = kk[m][j];
            A(t, i) = qk[m][j];
            if (i == t) squares[t] = kk[m][j];
        }
    }
    barrier();

    // Lengths and gates.
    if (tid < CHUNK) {
        const uint token = min(t0 + tid, p.n - 1u);
        const bool real = t0 + tid < p.n && pos[token] >= 0;
        k_unit[tid] = 1.0 / sqrt(squares[tid] + p.length_eps);
        q_unit[tid] = real ? p.q_scale / sqrt(q_unit[tid] + p.length_eps) : 0.0;
        decay[tid] = real ? decay_of(alpha[token * N_HEAD + head], dt_bias[head], a[head]) : 1.0;
        share[tid] = real ? sigmoid(beta[token * N_HEAD + head]) : 0.0;
    }
    barrier();

    // Times D. A thread goes down a part of a column.
    {
        const uint rows = CHUNK * CHUNK / WG_SIZE, i = tid % CHUNK, from = tid / CHUNK * rows;
        float d = 1.0;
        for (uint s = i + 1u; s < from; s++) d *= decay[s];
        [[unroll]] for (uint r = 0; r < rows; r++) {
            const uint t = from + r;
            if (t > i) d *= decay[t];
            L(t, i) = t > i ? share[t] * k_unit[t] * (k_unit[i] * d * L(t, i)) : 0.0;
            A(t, i) = t >= i ? q_unit[t] * (k_unit[i] * d * A(t, i)) : 0.0;
            if (i == 0u) before[t] = d * decay[0];
        }
        if (from + rows == CHUNK) after[i] = d;
    }
    barrier();
    if (tid < CHUNK) {
        const float seen = before[tid];
        factors[at * CHUNK + tid] = vec4(seen * k_unit[tid], seen * q_unit[tid], after[tid] * k_unit[tid], before[CHUNK - 1]);
    }

    // (I + L)^-1: blocks on the diagonal by forward substitution, a thread for a column.
    {
        const uint in_block = tid % BLOCK, block = tid / BLOCK * BLOCK;
        float x[BLOCK];
        if (tid < CHUNK) {
            [[unroll]] for (uint t = 0; t < BLOCK; t++) {
                x[t] = t == in_block ? 1.0 : 0.0;
                [[unroll]] for (uint s = 0; s < t; s += 4) {
                    const vec4 l = pool[(block + t) * ROW + (block + s) / 4u];
                    x[t] = fma(-l.x, x[s], x[t]);
                    if (s + 1 < t) x[t] = fma(-l.y, x[s + 1], x[t]);
                    if (s + 2 < t) x[t] = fma(-l.z, x[s + 2], x[t]);
                    if (s + 3 < t) x[t] = fma(-l.w, x[s + 3], x[t]);
                }
            }
        }
        barrier();
        if (tid < CHUNK) [[unroll]] for (uint t = 0; t < BLOCK; t++) L(block + t, tid) = x[t];
    }

    // Then pairs of blocks: below the diagonal of ((P, 0), (Q, R)) stands -R^-1 Q P^-1. Q P^-1 waits above the diagonal.
    [[unroll]] for (uint size = BLOCK; size < CHUNK; size *= 2) {
        barrier();
        for (uint i = tid; i < CHUNK * size / 2; i += WG_SIZE) {
            const uint r = i / size % size, c = i % size, base = i / (size * size) * 2 * size;
            float sum = 0.0;
            for (uint s = c; s < size; s++) sum = fma(L(base + size + r, base + s), L(base + s, base + c), sum);
            L(base + r, base + size + c) = sum;
        }
        barrier();
        for (uint i = tid; i < CHUNK * size / 2; i += WG_SIZE) {
            const uint r = i / size % size, c = i % size, base = i / (size * size) * 2 * size;
            float sum = 0.0;
            for (uint s = 0u; s <= r; s++) sum = fma(-L(base + size + r, base + size + s), L(base + s, base + size + c), sum);
            L(base + size + r, base + c) = sum;
        }
    }
    barrier();

    const uint out_at = at * 2 * CHUNK * ACROSS;
    for (uint i = tid; i < CHUNK * ACROSS; i += WG_SIZE) {
        const uint t = i / ACROSS, quad = i % ACROSS, c = 4u * quad;
        const vec4 x = pool[t * ROW + quad];
        const vec4 made = vec4(
            c <= t ? x.x * share[c] : 0.0, c + 1u <= t ? x.y * share[c + 1u] : 0.0, c + 2u <= t ? x.z * share[c + 2u] : 0.0,
            c + 3u <= t ? x.w * share[c + 3u] : 0.0
        );
        pool[t * ROW + quad] = made;
        matrices[out_at + i] = made;
    }
    barrier();
    vec4 sums[TOKENS];
    [[unroll]] for (uint m = 0; m < TOKENS; m++) sums[m] = vec4(0.0);
    for (uint s = tx; s < ACROSS; s++) {  // rows of T above the column are zeros
        vec4 x[4];
        [[unroll]] for (uint j = 0; j < 4; j++) x[j] = pool[(4u * s + j) * ROW + tx];
        [[unroll]] for (uint m = 0; m < TOKENS; m++) {
            const vec4 row = pool[(CHUNK + m * DOWN + ty) * ROW + s];
            sums[m] = fma(vec4(row.x), x[0], fma(vec4(row.y), x[1], fma(vec4(row.z), x[2], fma(vec4(row.w), x[3], sums[m]))));
        }
    }
    [[unroll]] for (uint m = 0; m < TOKENS; m++) matrices[out_at + (CHUNK + m * DOWN + ty) * ACROSS + tx] = sums[m];
}

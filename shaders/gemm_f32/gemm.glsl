// Batched matrix product in f32, y = A B: A [m, k], B [k, n], y [m, n]. What gemm_f32/gemm.comp and gemm_f32/gemm_weight.comp share.
//
//   binding 1  A F32, row-major [m, k] or, with A_TRANSPOSED, column-major (the m values of a column are neighbours)
//   binding 2  y F32 [batches, m, n]; with several splits [splits, m, n], each the sum over a part of k
//
// A workgroup of 8 x 8 threads makes a tile of 8 TM x 8 TN values, TM x TN per thread, from tiles of A and B in shared memory, DEPTH values of
// k at a time. Grid: tiles along n, tiles along m, batches * splits. Every sum is one chain of fma in the order of k.
//
// The including file has b_tile and
//   void load_b(uint k0, uint end, uint column, uint batch, uint t)    loads rows k0 .. k0 + DEPTH - 1 of B,
//                                                                      TILE_N columns, into b_tile; 0 outside
//
// Defines: TM, TN, DEPTH, A_TRANSPOSED

layout(std430, set = 0, binding = 1) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 2) buffer OutY { float y[]; };

#define TILE_M (8 * TM)
#define PITCH_M (TILE_M + 4)

shared float a_tile[DEPTH * PITCH_M];

void main() {
    const uint t = gl_LocalInvocationIndex, tx = t & 7u, ty = t >> 3;
    const uint column = gl_WorkGroupID.x * TILE_N, row = gl_WorkGroupID.y * TILE_M;
    const uint split = gl_WorkGroupID.z % p.splits, batch = gl_WorkGroupID.z / p.splits;
    const uint a_base = batch * p.m * p.k;
#ifdef UNIT_TABLE
    unit_table(t, 64u);
    barrier();
#endif
    float sum[TM][TN];
    [[unroll]] for (uint i = 0u; i < TM; i++)
        [[unroll]] for (uint j = 0u; j < TN; j++) sum[i][j] = 0.0;
    const uint end = min((split + 1u) * p.k_per_split, p.k);
    for (uint k0 = split * p.k_per_split; k0 < end; k0 += DEPTH) {
        [[unroll]] for (uint e = 0u; e < TILE_M * DEPTH / 64u; e++) {
            const uint i = e * 64u + t;
#if A_TRANSPOSED
            const uint k = i / TILE_M, at = i % TILE_M;
#else
            const uint k = i % DEPTH, at = i / DEPTH;
#endif
            float v = 0.0;
            if (k0 + k < end && row + at < p.m) {
#if A_TRANSPOSED
                v = a[a_base + (p.a_column0 + k0 + k) * p.stride + row + at];
#else
                v = a[a_base + (row + at) * p.stride + p.a_column0 + k0 + k];
#endif
            }
            a_tile[k * PITCH_M + at] = v;
        }
        load_b(k0, end, column, batch, t);
        barrier();
        for (uint k1 = 0u; k1 < DEPTH; k1 += 8u) {
            [[unroll]] for (uint k2 = 0u; k2 < 8u; k2++) {
                const uint k = k1 + k2;
                float frag_a[TM], frag_b[TN];
                [[unroll]] for (uint i = 0u; i < TM; i++) frag_a[i] = a_tile[k * PITCH_M + ty * TM + i];
                [[unroll]] for (uint j = 0u; j < TN; j++) frag_b[j] = b_tile[k * PITCH_N + tx * TN + j];
                [[unroll]] for (uint i = 0u; i < TM; i++)
                    [[unroll]] for (uint j = 0u; j < TN; j++) sum[i][j] = fma(frag_a[i], frag_b[j], sum[i][j]);
            }
        }
        barrier();
    }
    [[unroll]] for (uint i = 0u; i < TM; i++) {
        [[unroll]] for (uint j = 0u; j < TN; j++) {
            const uint r = row + ty * TM + i, c = column + tx * TN + j;
            if (r < p.m && c < p.n) {
                const uint at = ((p.y_split0 + gl_WorkGroupID.z) * p.m + r) * p.n + c;
                y[at] = p.add != 0u ? y[at] + sum[i][j] : sum[i][j];
            }
        }
    }
}

// Batched matrix product in f32, y = A B, as gemm_f32/gemm.glsl, but for CPU drivers: no shared memory; lanes broadcast the values of B to each
// other by shuffles, which cost one instruction there, where a load costs one per lane.
//
//   binding 1  A F32, row-major [m, k] or, with A_TRANSPOSED, column-major (the m values of a column are neighbours)
//   binding 2  y F32 [batches, m, n]
//
// A workgroup is one subgroup of LANES threads and makes LANES * VECTORS rows by 32 columns; thread t has rows t, t + LANES, ... For LANES
// values of k at a time, thread t loads 32 columns of row k0 + t of B. Grid: columns, rows, batches.
//
// The including file has
//   void load_b(uint k, uint end, uint column, uint batch, out vec4 v[8])    loads 32 columns of a row of B; any values outside
//
// Defines: LANES, VECTORS, A_TRANSPOSED

// Most terms that are added in one chain. Longer sums are sums of chains, since the error of f32 grows with the length of a chain.
#define MAX_CHAIN 2048u

layout(std430, set = 0, binding = 1) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = 2) buffer OutY { float y[]; };

void main() {
    const uint t = gl_LocalInvocationIndex;
    const uint column = gl_WorkGroupID.x * 32u, row = gl_WorkGroupID.y * LANES * VECTORS, batch = gl_WorkGroupID.z;
    const uint a_base = batch * p.m * p.k;
#ifdef UNIT_TABLE
    unit_table(t, LANES);
    barrier();
#endif
    vec4 total[VECTORS][8], sums[VECTORS][8];
    [[unroll]] for (uint v = 0u; v < VECTORS; v++)
        [[unroll]] for (uint j = 0u; j < 8u; j++) total[v][j] = vec4(0.0);
    for (uint from = 0u; from < p.k; from += MAX_CHAIN) {
        [[unroll]] for (uint v = 0u; v < VECTORS; v++)
            [[unroll]] for (uint j = 0u; j < 8u; j++) sums[v][j] = vec4(0.0);
        for (uint k0 = from; k0 < min(from + MAX_CHAIN, p.k); k0 += LANES) {
            vec4 own[8];
            load_b(k0 + t, p.k, column, batch, own);
            [[unroll]] for (uint i = 0u; i < LANES; i++) {
                const uint k = k0 + i;
                float frag_a[VECTORS];
                [[unroll]] for (uint v = 0u; v < VECTORS; v++) {
                    const uint at = row + v * LANES + t;
#if A_TRANSPOSED
                    frag_a[v] = k < p.k && at < p.m ? a[a_base + (p.a_column0 + k) * p.stride + at] : 0.0;
#else
                    frag_a[v] = k < p.k && at < p.m ? a[a_base + at * p.stride + p.a_column0 + k] : 0.0;
#endif
                }
                [[unroll]] for (uint j = 0u; j < 8u; j++) {
                    const vec4 frag_b = subgroupShuffle(own[j], i);
                    [[unroll]] for (uint v = 0u; v < VECTORS; v++) sums[v][j] = fma(vec4(frag_a[v]), frag_b, sums[v][j]);
                }
            }
        }
        [[unroll]] for (uint v = 0u; v < VECTORS; v++)
            [[unroll]] for (uint j = 0u; j < 8u; j++) total[v][j] += sums[v][j];
    }
    [[unroll]] for (uint v = 0u; v < VECTORS; v++) {
        const uint r = row + v * LANES + t;
        [[unroll]] for (uint j = 0u; j < 8u; j++)
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                const uint at = (batch * p.m + r) * p.n + column + 4u * j + c;
                if (r < p.m && column + 4u * j + c < p.n) y[at] = p.add != 0u ? y[at] + total[v][j][c] : total[v][j][c];
            }
    }
}

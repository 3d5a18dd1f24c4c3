// The loop of shaders/mat_mul/coop_reg.comp for Q4_K, by hand as CUDA, to count what NVIDIA's code generator makes of it where there is no GPU
// (2026-11-23_nvcc-13_instructions.md). Nothing here is run; no result is right or wrong.
//
//   nvcc -arch=sm_90 -cubin -DNS=1 -DKNOWN=0 -DF16_SCALES=1 -DMOST=0x0fffffffu FILE && nvdisasm -c FILE.cubin
#include <cuda_fp16.h>
#include <cstdint>

#ifndef NS
#define NS 1  // matrices of columns: 8 tokens each
#endif
#ifndef KNOWN
#define KNOWN 0  // 1: the compiler knows 1024 as two f16
#endif
#ifndef F16_SCALES
#define F16_SCALES 1  // scale and minimum made in f16
#endif
#ifndef MOST
#define MOST 0x0fffffffu  // largest index of a 16-byte item
#endif

typedef uint32_t u;
__device__ __forceinline__ __half2 pair_of(u w) { return *reinterpret_cast<__half2*>(&w); }
__device__ __forceinline__ u word_of(__half2 h) { return *reinterpret_cast<u*>(&h); }
__device__ __forceinline__ __half2 both(float f) { return __float2half2_rn(f); }

__device__ __forceinline__ void multiply(float (&c)[4], u a0, u a1, u a2, u a3, u b0, u b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void decode(uint4 qs, uint4 head, u sub, u one_k, u (&w)[16]) {
    const u lo = ((sub & 4u) == 0u ? head.y : head.z) >> (8u * (sub & 3u)), hi = head.w >> (4u * sub);
#if F16_SCALES
    const u bits = (lo & 0xfu) | ((lo << 12) & 0xf0000u) | ((hi << 4) & 0x30u) | ((hi << 18) & 0x300000u);
    const __half2 made = __hmul2(__hsub2(pair_of(bits | one_k), both(1024.f)), pair_of(head.x));
    const __half2 scale = __low2half2(made), bias = __hneg2(__high2half2(made));
#else
    const int s = (lo & 0xfu) | ((hi << 4) & 0x30u), m = ((lo >> 4) & 0xfu) | ((hi << 2) & 0x30u);
    const float2 d = __half22float2(pair_of(head.x));
    const __half2 scale = __float2half2_rn(d.x * s), bias = __float2half2_rn(-(d.y * m));
#endif
    const u q[4] = {qs.x, qs.y, qs.z, qs.w}, flipped = one_k ^ 0x00800080u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u even = q[i], odd = even >> 8;
        const int at = i / 2 * 4 + i % 2 * 2;
        w[at] = word_of(__hfma2(__hsub2(pair_of((even & 0x000f000fu) | one_k), both(1024.f)), scale, bias));
        w[at + 1] = word_of(__hfma2(__hsub2(pair_of((odd & 0x000f000fu) | one_k), both(1024.f)), scale, bias));
        w[at + 8] = word_of(__hfma2(__hfma2(pair_of((even & 0x00f000f0u) ^ flipped), both(0.0625f), both(-64.f)), scale, bias));
        w[at + 9] = word_of(__hfma2(__hfma2(pair_of((odd & 0x00f000f0u) ^ flipped), both(0.0625f), both(-64.f)), scale, bias));
    }
}

extern "C" __global__ void __launch_bounds__(256) products(const uint4* __restrict__ weights, const uint4* __restrict__ x, float* y, u units,
                                                          u head0, u steps, u x_stride, u m) {
    const u one_k = KNOWN ? 0x64006400u : 0x64006400u ^ (units >> 31);
    const u lane = threadIdx.x & 31, slice = threadIdx.x >> 5, t = lane & 3, row0 = blockIdx.x * 16 + lane / 4, blocks = steps * 2;
    const u rows[2] = {min(row0, m - 1) * units, min(row0 + 8, m - 1) * units};
    float sums[NS][4] = {};
    uint4 qs[2][2], head[2], columns[NS][4];
    u step = slice;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u unit = rows[r] + min(step, steps - 1) * 8 + t;
        qs[r][0] = weights[unit & MOST];
        qs[r][1] = weights[(unit & MOST) + 4];
        head[r] = weights[(head0 + (unit >> 3)) & MOST];
    }
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) columns[n][i] = x[((n * x_stride + slice * 256 + lane) & MOST) + i * 32];
#pragma unroll 1
    for (; step < steps; step += 8) {
        const u next = min(step + 8, steps - 1) * 8 + t;
#pragma unroll
        for (int unit = 0; unit < 2; unit++) {
            const u next_block = min(unit == 0 ? step * 2 + 1 : (step + 8) * 2, blocks - 1);
            u w[2][16];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                decode(qs[r][unit], head[r], t + unit * 4, one_k, w[r]);
                qs[r][unit] = weights[((rows[r] + next) & MOST) + unit * 4];
                if (unit == 1) head[r] = weights[(head0 + ((rows[r] + next) >> 3)) & MOST];
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int n = 0; n < NS; n++) {
                    const uint4 v = columns[n][j / 2];
                    multiply(sums[n], w[0][2 * j], w[1][2 * j], w[0][2 * j + 1], w[1][2 * j + 1], j & 1 ? v.z : v.x, j & 1 ? v.w : v.y);
                    if (j & 1) columns[n][j / 2] = x[((n * x_stride + next_block * 128 + lane) & MOST) + j / 2 * 32];
                }
        }
    }
#pragma unroll
    for (int n = 0; n < NS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) y[((blockIdx.x * 8 + slice) * NS + n) * 128 + i * 32 + lane] = sums[n][i];
}

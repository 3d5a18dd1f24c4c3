// Sums and maxima over a one-dimensional workgroup of WG_SIZE threads, or over groups of its lanes; every thread gets the result.
//
//   float wg_sum(float v)   float wg_max(float v)   uint wg_sum(uint v)   uint wg_max(uint v)
//   float group_sum(float v, uint lanes)   uint group_sum(uint v, uint lanes)   uint group_max(uint v, uint lanes)
//
// wg_*     every thread of the workgroup calls, from uniform control flow. One barrier per call; none if the workgroup is one subgroup.
// group_*  over aligned groups of `lanes` threads, a power of two. Only with REDUCE_GROUPS 1. With REDUCE_SUBGROUP 1: by shuffles, `lanes` is
//          at most the subgroup size, and only the threads of a group must call together. With 0: through shared memory, `lanes` is at most
//          WG_SIZE, and every thread of the workgroup must call.
//
// Defines:
//   WG_SIZE          threads of the workgroup, a power of two
//   REDUCE_SUBGROUP  1: subgroup arithmetic (and shuffles for group_*); 0: shared memory only
//   REDUCE_GROUPS    1: group_* wanted. A define, since a shader that merely contains a shuffle already requires the feature
//   SUBGROUP_SIZE    the subgroup size, if it is pinned or the device has only one; 0 or undefined: known only at run time
//
// The order of additions depends only on thread numbers and the device: equal inputs give equal bits.

#if (WG_SIZE & (WG_SIZE - 1)) != 0
#error WG_SIZE must be a power of two
#endif
#ifndef REDUCE_GROUPS
#define REDUCE_GROUPS 0
#endif
#ifndef SUBGROUP_SIZE
#define SUBGROUP_SIZE 0
#endif

#if REDUCE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#if REDUCE_GROUPS
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
// Mobile GPUs have subgroups of as few as 4 lanes.
#define REDUCE_PARTS ((WG_SIZE + 3) / 4)
#define REDUCE_ONE_SUBGROUP (WG_SIZE <= SUBGROUP_SIZE || WG_SIZE == 1)
#else
#define REDUCE_PARTS WG_SIZE
#define REDUCE_ONE_SUBGROUP (WG_SIZE == 1)
#endif

#if !REDUCE_ONE_SUBGROUP || (REDUCE_GROUPS && !REDUCE_SUBGROUP)
// Double buffering: a thread that writes a half again has passed the barrier of the call in between, so all others have read it.
shared uint reduce_parts[2][REDUCE_PARTS];
uint reduce_buf = 0u;
#endif

float reduce_add(float a, float b) { return a + b; }
uint reduce_add(uint a, uint b) { return a + b; }
float reduce_bits(uint bits, float kind) { return uintBitsToFloat(bits); }
uint reduce_bits(uint bits, uint kind) { return bits; }
uint reduce_word(float v) { return floatBitsToUint(v); }
uint reduce_word(uint v) { return v; }

#if REDUCE_SUBGROUP && REDUCE_ONE_SUBGROUP
#define REDUCE_WG(NAME, T, COMBINE, SUBGROUP, IDENTITY) T NAME(T v) { return SUBGROUP(v); }
#elif REDUCE_ONE_SUBGROUP
#define REDUCE_WG(NAME, T, COMBINE, SUBGROUP, IDENTITY) T NAME(T v) { return v; }
#elif REDUCE_SUBGROUP && SUBGROUP_SIZE * SUBGROUP_SIZE >= WG_SIZE
// Every subgroup reduces the parts again, one part per lane: no serial loop.
#define REDUCE_WG(NAME, T, COMBINE, SUBGROUP, IDENTITY)                                    \
    T NAME(T v) {                                                                          \
        v = SUBGROUP(v);                                                                   \
        const uint buf = reduce_buf;                                                       \
        reduce_buf ^= 1u;                                                                  \
        if (subgroupElect()) reduce_parts[buf][gl_SubgroupID] = reduce_word(v);            \
        barrier();                                                                         \
        const uint lane = gl_SubgroupInvocationID;                                         \
        return SUBGROUP(lane < WG_SIZE / SUBGROUP_SIZE ? reduce_bits(reduce_parts[buf][lane], v) : IDENTITY);  \
    }
#elif REDUCE_SUBGROUP
#define REDUCE_WG(NAME, T, COMBINE, SUBGROUP, IDENTITY)                                              \
    T NAME(T v) {                                                                          \
        v = SUBGROUP(v);                                                                   \
        if (gl_NumSubgroups == 1u) return v;                                               \
        const uint buf = reduce_buf;                                                       \
        reduce_buf ^= 1u;                                                                  \
        if (subgroupElect()) reduce_parts[buf][gl_SubgroupID] = reduce_word(v);            \
        barrier();                                                                         \
        v = reduce_bits(reduce_parts[buf][0], v);                                          \
        for (uint i = 1u; i < gl_NumSubgroups; i++) v = COMBINE(v, reduce_bits(reduce_parts[buf][i], v));  \
        return v;                                                                          \
    }
#else
#define REDUCE_WG(NAME, T, COMBINE, SUBGROUP, IDENTITY)                                              \
    T NAME(T v) {                                                                          \
        const uint buf = reduce_buf;                                                       \
        const uint t = gl_LocalInvocationID.x;                                             \
        reduce_buf ^= 1u;                                                                  \
        reduce_parts[buf][t] = reduce_word(v);                                             \
        barrier();                                                                         \
        for (uint half_size = WG_SIZE / 2u; half_size > 0u; half_size >>= 1) {             \
            if (t < half_size) {                                                           \
                v = COMBINE(v, reduce_bits(reduce_parts[buf][t + half_size], v));          \
                reduce_parts[buf][t] = reduce_word(v);                                     \
            }                                                                              \
            barrier();                                                                     \
        }                                                                                  \
        return reduce_bits(reduce_parts[buf][0], v);                                       \
    }
#endif

REDUCE_WG(wg_sum, float, reduce_add, subgroupAdd, 0.0)
REDUCE_WG(wg_sum, uint, reduce_add, subgroupAdd, 0u)
REDUCE_WG(wg_max, float, max, subgroupMax, uintBitsToFloat(0xff800000u))
REDUCE_WG(wg_max, uint, max, subgroupMax, 0u)

#if REDUCE_GROUPS
#if REDUCE_SUBGROUP
#include "common/lane_butterfly.glsl"
#define REDUCE_GROUP(NAME, T, COMBINE)                                                     \
    T NAME(T v, uint lanes) {                                                              \
        LANE_BUTTERFLY(v, COMBINE, 1, lanes)                                               \
        return v;                                                                          \
    }
#else
#define REDUCE_GROUP(NAME, T, COMBINE)                                                     \
    T NAME(T v, uint lanes) {                                                              \
        const uint t = gl_LocalInvocationID.x;                                             \
        for (uint step_size = 1u; step_size < lanes; step_size <<= 1) {                    \
            const uint buf = reduce_buf;                                                   \
            reduce_buf ^= 1u;                                                              \
            reduce_parts[buf][t] = reduce_word(v);                                         \
            barrier();                                                                     \
            v = COMBINE(v, reduce_bits(reduce_parts[buf][t ^ step_size], v));              \
        }                                                                                  \
        return v;                                                                          \
    }
#endif
REDUCE_GROUP(group_sum, float, reduce_add)
REDUCE_GROUP(group_sum, uint, reduce_add)
REDUCE_GROUP(group_max, uint, max)
#endif

// Counted arrivals: synchronization between two kernels without a pipeline barrier. Each workgroup of the producer increments a counter once
// its results are stored; the workgroups of the consumer spin-wait until the counter says that all have arrived. Used where spinning on the
// results themselves (common/sentinel.glsl, whose rules hold here too) does not work: they are too many, their memory was not filled with
// SENTINEL, or every workgroup reads them repeatedly and wants them cached.
//
// There are COUNTERS counters, each in a cache line of its own. A producer increments all of them, and the waiting workgroups share them out:
// a thousand workgroups polling one word would hold up the atomics of those that arrive.
//
// Include after the workgroup layout. Before a run the counters hold SENTINEL. Defines, or constants of the kernel:
//   ARRIVES   not 0: arrive() counts; needs BIND_ARRIVALS (uint [COUNTERS * COUNTER_WORDS])
//   EXPECTED  arrivals to wait for; 0: do not wait. Needs BIND_EXPECTED (the producer's counters) and BIND_SYNC_STATE
//
// Every thread calls these, from uniform control flow:
//   void arrive()             after the workgroup has stored all of its results
//   uint wait_for_arrivals()  returns a 0 that the compiler cannot know. Add it to the address of a read that must come after the wait: the
//                             read then depends on the wait and cannot be moved ahead of it
//   uint wait_for_first()     the same for what a kernel needs ahead of its other inputs, by a counter of its own: EXPECTED_FIRST and
//                             BIND_FIRST; with BIND_EXPECTED
//
// The polled buffer is not declared readonly: newer compilers would mark the variable NonWritable, and a driver may then read it through a
// cache that stores of other workgroups do not reach.

#extension GL_KHR_memory_scope_semantics : require

#ifndef SENTINEL
#define SENTINEL 0x80808080u
#endif
#define COUNTERS 16u       // the same number as in vkback/plan/sync.py
#define COUNTER_WORDS 32u
#ifndef MAX_SPINS
#define MAX_SPINS (1u << 18)
#endif

#ifdef BIND_ARRIVALS
layout(std430, set = 0, binding = BIND_ARRIVALS) coherent buffer Arrivals { uint arrivals[]; };

void arrive() {
    if (ARRIVES == 0) return;
    // Makes the workgroup's stores visible within it, then to the device. On an H200 each of groupMemoryBarrier() and memoryBarrierBuffer()
    // takes half a microsecond; a barrier with these semantics takes no more than barrier(). The release is left to a few threads, for all.
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer, gl_SemanticsAcquireRelease);
    if (gl_LocalInvocationIndex >= COUNTERS) return;
    memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsRelease);
    for (uint i = gl_LocalInvocationIndex; i < COUNTERS; i += gl_WorkGroupSize.x) atomicAdd(arrivals[i * COUNTER_WORDS], 1u);
}
#else
#define arrive()
#endif

#ifdef BIND_EXPECTED
layout(std430, set = 0, binding = BIND_EXPECTED) coherent volatile buffer SeenArrivals { uint seen_arrivals[]; };
#if !defined(SPINS) || !SPINS
layout(std430, set = 0, binding = BIND_SYNC_STATE) coherent volatile buffer SyncState { uint spin_timeout; };
#endif

#define WAIT_FOR(COUNT, COUNTER, MISSING)                                                     \
    if (COUNT == 0) return 0u;                                                                \
    if (gl_LocalInvocationIndex == 0u) {                                                      \
        uint missing = COUNT;                                                                 \
        for (uint reads = 1u; missing != 0u; reads++) {                                       \
            missing = COUNT - (COUNTER[gl_WorkGroupID.x % COUNTERS * COUNTER_WORDS] - SENTINEL); \
            if (reads == MAX_SPINS) spin_timeout = 1u;                                        \
            /* Once one wait has timed out, the others need not spin as long. */              \
            if (reads == MAX_SPINS || ((reads & 1023u) == 0u && spin_timeout != 0u)) missing = 0u; \
        }                                                                                     \
        MISSING = missing;                                                                    \
    }                                                                                         \
    barrier();                                                                                \
    return MISSING;

shared uint missing_arrivals;

uint wait_for_arrivals() { WAIT_FOR(EXPECTED, seen_arrivals, missing_arrivals) }

#ifdef BIND_FIRST
layout(std430, set = 0, binding = BIND_FIRST) coherent volatile buffer FirstArrivals { uint first_arrivals[]; };

shared uint missing_first;

uint wait_for_first() { WAIT_FOR(EXPECTED_FIRST, first_arrivals, missing_first) }
#endif
#else
uint wait_for_arrivals() { return 0u; }
#endif

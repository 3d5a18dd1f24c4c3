// Counted arrivals: the workgroups of a kernel count themselves in a word of memory once their results are stored, and those of a later
// kernel spin-wait on that word until all have arrived. For results that are too many to be spun on themselves (common/sentinel.glsl, whose
// rules hold here, too), that lie in memory not filled with SENTINEL, or that every workgroup reads again and again by way of a cache.
//
// There are COUNTERS such words, a cache line apart: each arrival counts in all of them, and the workgroups that wait share them out. Otherwise
// a thousand workgroups that poll one word would hold up those that count in it.
//
// Included behind the layout of the workgroup. Before a run the words hold SENTINEL. Defines, or constants of the kernel:
//   ARRIVES   not 0: arrive() counts; needs BIND_ARRIVALS
//   EXPECTED   arrivals to wait for, 0: none; needs BIND_EXPECTED and BIND_SYNC_STATE
//
//   void arrive()           every thread calls, from uniform control flow, when the workgroup has stored everything
//   uint wait_for_arrivals()   every thread calls, from uniform control flow. It gives 0, of which no compiler knows: with that in its address, a read of
//                           what was waited for cannot move ahead of the wait
//
// A buffer that is polled is not declared readonly: newer compilers then call the variable itself NonWritable, which lets a driver take
// its value from a cache that no other workgroup's store reaches.

#ifndef SENTINEL
#define SENTINEL 0x80808080u
#endif
#define COUNTERS 16u       // as in vkback/plan/sync.py
#define COUNTER_WORDS 32u
#ifndef MAX_SPINS
#define MAX_SPINS (1u << 18)
#endif

#ifdef BIND_ARRIVALS
layout(std430, set = 0, binding = BIND_ARRIVALS) coherent buffer Arrivals { uint arrivals[]; };

void arrive() {
    if (ARRIVES == 0) return;
    // First all that the workgroup has stored is seen within it, then by the device; the second takes long, and few threads do it for all.
    groupMemoryBarrier();
    barrier();
    if (gl_LocalInvocationIndex >= COUNTERS) return;
    memoryBarrierBuffer();
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

shared uint missing_arrivals;

uint wait_for_arrivals() {
    if (EXPECTED == 0) return 0u;
    if (gl_LocalInvocationIndex == 0u) {
        uint missing = EXPECTED;
        for (uint reads = 1u; missing != 0u; reads++) {
            missing = EXPECTED - (seen_arrivals[gl_WorkGroupID.x % COUNTERS * COUNTER_WORDS] - SENTINEL);
            if (reads == MAX_SPINS) spin_timeout = 1u;
            // Once one wait has timed out, the others need not spin as long.
            if (reads == MAX_SPINS || ((reads & 1023u) == 0u && spin_timeout != 0u)) missing = 0u;
        }
        missing_arrivals = missing;
    }
    barrier();
    return missing_arrivals;
}
#else
uint wait_for_arrivals() { return 0u; }
#endif

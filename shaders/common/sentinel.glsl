// Fine-grained synchronization between a producer and a consumer stage: spin-waits on a sentinel value instead of a pipeline barrier. Buffers
// are filled with SENTINEL before a run. The consumer's workgroups start while the producer's last ones still run; they load their weights
// meanwhile, and poll each word they need until it is no longer SENTINEL.
//
//   SYNC_SENTINEL  1: the kernel is a producer: it stores results with not_sentinel(), so that no stored word equals SENTINEL
//   SPINS          1: the kernel is a consumer: it reads the previous stage's results with SPIN_UNTIL
//   SPINS_ON_ALL   1: it also spins on its other inputs, those that often are older than the last barrier; here they are not
//   SPINS_ON_PARTS 1: likewise of inputs that a workgroup reads a part of, as the residual of a GEMV
//
//   SPIN_UNTIL(read, arrived)   repeats the statement `read` until the condition `arrived` holds, each thread by itself
//   bool arrived(words)         none of the words is SENTINEL
//   not_sentinel(v)             v (float or vec4), with -0 in place of the one float whose bits are SENTINEL, -1.18e-38
//
// Polled buffers are declared SYNC_INPUT (coherent, volatile), so that every read goes to memory. They are not declared readonly: newer
// compilers would mark the variable NonWritable, and a driver may then read it through a cache that stores of other workgroups do not reach
// (H200, driver 580: the spin-wait timed out). Some stores need no not_sentinel(), since
// their values are never SENTINEL: Q8_1 (int8 are at least -127, d is not negative, sums are at most 2032 in size), ids and experts' weights
// (not negative). Data that was complete before the stores a kernel has seen may be read without spinning (rules in vkback/plan/sync.py).
//
// A spin-wait ends only if the workgroups it waits for are resident or done, that is, if workgroups start in dispatch order. No specification
// promises that. After MAX_SPINS reads a spin-wait therefore times out: it sets spin_timeout and goes on, so that nothing hangs. The host
// checks spin_timeout and discards the results.

#ifndef SYNC_SENTINEL
#define SYNC_SENTINEL 0
#define SPINS 0
#endif

#ifndef SPINS_ON_ALL
#define SPINS_ON_ALL 0
#endif

#ifndef SPINS_ON_PARTS
#define SPINS_ON_PARTS 0
#endif

#define SENTINEL 0x80808080u

#if SYNC_SENTINEL
float not_sentinel(float v) { return floatBitsToUint(v) == SENTINEL ? -0.0 : v; }
vec4 not_sentinel(vec4 v) { return mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(SENTINEL))); }
#else
#define not_sentinel(v) (v)
#endif

#if SPINS
#define SYNC_INPUT coherent volatile

layout(std430, set = 0, binding = BIND_SYNC_STATE) coherent volatile buffer SyncState { uint spin_timeout; };

// About a quarter of a second on an H200; no stage takes that long.
#ifndef MAX_SPINS
#define MAX_SPINS (1u << 18)
#endif

bool timed_out(inout uint reads) {
    reads++;
    if (reads == MAX_SPINS) spin_timeout = 1u;
    // Once one wait has timed out, the others need not spin as long.
    return reads == MAX_SPINS || ((reads & 1023u) == 0u && spin_timeout != 0u);
}

bool arrived(uint word) { return word != SENTINEL; }
bool arrived(uvec2 words) { return all(notEqual(words, uvec2(SENTINEL))); }
bool arrived(uvec4 words) { return all(notEqual(words, uvec4(SENTINEL))); }
bool arrived(float v) { return arrived(floatBitsToUint(v)); }
bool arrived(vec2 v) { return arrived(floatBitsToUint(v)); }
bool arrived(vec4 v) { return arrived(floatBitsToUint(v)); }

#define SPIN_UNTIL(READ, ARRIVED)                      \
    {                                                  \
        uint reads = 0u;                               \
        for (;;) {                                     \
            READ;                                      \
            if ((ARRIVED) || timed_out(reads)) break;  \
        }                                              \
    }

// SPIN_UNTIL where `read` has already been executed once.
#define SPIN_ON(READ, ARRIVED)                            \
    {                                                     \
        uint reads = 0u;                                  \
        while (!(ARRIVED) && !timed_out(reads)) { READ; } \
    }
#else
#define SYNC_INPUT readonly
#define SPIN_UNTIL(READ, ARRIVED) { READ; }
#endif

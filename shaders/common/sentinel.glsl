// Fine-grained producer-consumer synchronization between stages: spin-waits on a sentinel value instead of a pipeline barrier. A stage's
// workgroups start while the last ones of the stage before still run, load their weights, and read each word they need again and again until it
// is no longer the sentinel.
//
//   SYNC_SENTINEL  1: results are stored with not_sentinel(), so that no stored word equals SENTINEL
//   SPINS          1: inputs of the stage before are read with SPIN_UNTIL; memory holds SENTINEL wherever nothing was written yet
//
//   SPINS_ALSO     1: so are the inputs that may be older than the last barrier, because they are not
//
//   SPIN_UNTIL(read, arrived)   repeats the statement `read` until the condition `arrived` holds; each thread for itself
//   bool arrived(words)         whether none of the words is SENTINEL
//   not_sentinel(v)             v, a float or vec4, with -0 for the number whose bits are SENTINEL (-1.18e-38)
//
// Buffers that a kernel spins on are declared SYNC_INPUT (coherent, volatile), so that each read goes to memory. SENTINEL is no value of what is
// stored without not_sentinel(): four int8 of Q8_1 are -127 at least, its d is not negative, its sums are 2032 in size at most; ids and experts'
// weights are not negative either. What happened before the stores it saw may be read without a spin-wait (vkback/plan/sync.py has the rule).
//
// A spin-wait ends only if the workgroups it waits for are resident or done, that is, if workgroups start in the order of their dispatches. No
// specification promises that. After MAX_SPINS reads a spin-wait times out: it sets spin_timeout and goes on, so that nothing hangs. The host
// checks spin_timeout and drops the results.

#ifndef SYNC_SENTINEL
#define SYNC_SENTINEL 0
#define SPINS 0
#endif

#ifndef SPINS_ALSO
#define SPINS_ALSO 0
#endif

#define SENTINEL 0x80808080u

#if SYNC_SENTINEL
float not_sentinel(float v) { return floatBitsToUint(v) == SENTINEL ? -0.0 : v; }
vec4 not_sentinel(vec4 v) { return mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(SENTINEL))); }
#else
#define not_sentinel(v) (v)
#endif

#if SPINS
#define SYNC_INPUT coherent volatile readonly

layout(std430, set = 0, binding = BIND_SYNC_STATE) coherent volatile buffer SyncState { uint spin_timeout; };

// About a quarter of a second on an H200; no stage takes as long.
#ifndef MAX_SPINS
#define MAX_SPINS (1u << 18)
#endif

bool timed_out(inout uint reads) {
    reads++;
    if (reads == MAX_SPINS) spin_timeout = 1u;
    // Once one has timed out, the others need not spin as long.
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

// The same where `read` has been carried out once already.
#define SPIN_ON(READ, ARRIVED)                            \
    {                                                     \
        uint reads = 0u;                                  \
        while (!(ARRIVED) && !timed_out(reads)) { READ; } \
    }
#else
#define SYNC_INPUT readonly
#define SPIN_UNTIL(READ, ARRIVED) { READ; }
#endif

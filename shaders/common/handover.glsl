// Stages that hand over word by word instead of by a pipeline barrier. The next stage's workgroups start while the last ones of the stage before
// still run, ask for what does not depend on them, and then read again and again until every word they need is there.
//
//   HANDOVER  1: results are stored with never_empty(), so that none is the word EMPTY
//   AWAITS    1: what the stage before gives is read with AWAIT; memory holds EMPTY wherever it has written nothing yet
//
//   AWAIT(read, there)   carries out the statement `read` until `there` holds; each thread for itself
//   bool filled(words)   whether none of them is EMPTY
//   never_empty(v)       v, a float or vec4, with -0 for the number whose bits are EMPTY (-1.18e-38)
//
// What is awaited is declared HANDED: it must come from where the stage before left it, not from a cache. EMPTY is no value of what is stored
// without never_empty(): four int8 of Q8_1 are -127 at least, its d is not negative, its sums are 2032 in size at most; ids and experts' weights are
// not negative either. Whoever has awaited a stage's results may read everything that had to be complete for them.
//
// Waiting relies on workgroups being started in the order of their dispatches, which no specification promises. A wait that takes too long
// raises handover_failed and goes on, so that nothing hangs, and the host, which looks at it, does not use the results.

#ifndef HANDOVER
#define HANDOVER 0
#define AWAITS 0
#endif

#define EMPTY 0x80808080u

#if HANDOVER
float never_empty(float v) { return floatBitsToUint(v) == EMPTY ? -0.0 : v; }
vec4 never_empty(vec4 v) { return mix(v, vec4(-0.0), equal(floatBitsToUint(v), uvec4(EMPTY))); }
#else
#define never_empty(v) (v)
#endif

#if AWAITS
#define HANDED coherent volatile readonly

layout(std430, set = 0, binding = BIND_HANDOVER) coherent volatile buffer HandoverState { uint handover_failed; };

// About a quarter of a second on an H200; no stage takes as long.
#ifndef MOST_READS
#define MOST_READS (1u << 18)
#endif

bool gives_up(inout uint reads) {
    reads++;
    if (reads == MOST_READS) handover_failed = 1u;
    // Who waits behind one that gave up need not wait as long.
    return reads == MOST_READS || ((reads & 1023u) == 0u && handover_failed != 0u);
}

bool filled(uint word) { return word != EMPTY; }
bool filled(uvec2 words) { return all(notEqual(words, uvec2(EMPTY))); }
bool filled(uvec4 words) { return all(notEqual(words, uvec4(EMPTY))); }
bool filled(float v) { return filled(floatBitsToUint(v)); }
bool filled(vec2 v) { return filled(floatBitsToUint(v)); }
bool filled(vec4 v) { return filled(floatBitsToUint(v)); }

#define AWAIT(READ, THERE)                          \
    {                                               \
        uint reads = 0u;                            \
        for (;;) {                                  \
            READ;                                   \
            if ((THERE) || gives_up(reads)) break;  \
        }                                           \
    }

// The same where `read` has been carried out once.
#define AWAIT_ASKED(READ, THERE)                                            \
    {                                                                       \
        uint reads = 0u;                                                    \
        while (!(THERE) && !gives_up(reads)) { READ; }                      \
    }
#else
#define HANDED readonly
#define AWAIT(READ, THERE) { READ; }
#endif

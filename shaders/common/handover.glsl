// Stages that hand over by counters in memory instead of pipeline barriers (HANDOVER 1). The next stage's workgroups start while the last ones of
// the stage before still run, ask for what does not depend on them, and only then wait for their count.
//
//   void await_count(uint word, uint count)   once `count` workgroups have counted up `word`, what they wrote before may be read; 0: no wait
//   void count_up(uint word)                  this workgroup has written everything that those who wait for `word` may read; word 0: nobody
//
// All threads of a workgroup call both, from uniform control flow. What another stage has written is declared HANDED: it must come from where
// that stage left it, not from a cache of this one. HANDOVER_PUSH stands at the end of the push constants; the last argument of a dispatch is
// the buffer of counters, which the program puts to zero before every token.
//
// Waiting relies on workgroups being started in the order of their dispatches, which no specification promises: a wait that takes too long
// raises word 0 and goes on, so that nothing hangs, and the host, which looks at it, does not use the results.

#if HANDOVER
#define HANDOVER_PUSH uint first_word; uint first_count; uint before_word; uint before_count; uint done_word; uint soon_word;
#define HANDED coherent readonly

layout(std430, set = 0, binding = BIND_HANDOVER) coherent volatile buffer HandoverWords { uint handover_word[]; };

// About half a second on an H200, where a poll takes 0.5 us; no stage takes as long.
#define HANDOVER_POLLS (1u << 20)

void await_count(uint word, uint count) {
    if (count == 0u) return;
    if (gl_LocalInvocationIndex == 0u) {
        uint polls = 0u;
        while (handover_word[word] < count && polls < HANDOVER_POLLS) {
            polls++;
            // Who waits behind one that gave up need not wait as long.
            if ((polls & 1023u) == 0u && handover_word[0] != 0u) break;
        }
        if (polls == HANDOVER_POLLS) handover_word[0] = 1u;
        memoryBarrierBuffer();
    }
    barrier();
}

void count_up(uint word) {
    if (word == 0u) return;
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationIndex == 0u) atomicAdd(handover_word[word], 1u);
}

#define AWAIT_FIRST await_count(p.first_word, p.first_count)
#define AWAIT_BEFORE await_count(p.before_word, p.before_count)
#define DONE_SOON count_up(p.soon_word)
#define DONE count_up(p.done_word)
#else
#define HANDOVER_PUSH
#define HANDED readonly
#define AWAIT_FIRST
#define AWAIT_BEFORE
#define DONE_SOON
#define DONE
#endif

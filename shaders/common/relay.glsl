// Stages that hand over by a counter in memory instead of a pipeline barrier (RELAY 1): the next stage's workgroups start while the last ones of
// this stage still run, bring in what does not depend on it, and then wait for its count.
//
//   void relay_await()   everything that the stage before has written may be read from here on
//   void relay_done()    this workgroup has written everything
//
// All threads of every workgroup call both, from uniform control flow, relay_done as the last thing. A workgroup that writes nothing may leave
// out relay_await. Waiting relies on workgroups being launched in the order of the dispatches, which no specification promises: a wait that
// takes too long raises relay_word[0] and goes on, and the host runs the program again with barriers.
//
// RELAY_PUSH stands at the end of the push constants, named `p`: word to wait for and its final count (0: no wait), word to count up (0: none).

#if RELAY
#define RELAY_PUSH uint relay_before; uint relay_count; uint relay_mine;
#if RELAY_MODE == 0
#define HANDED coherent
#else
#define HANDED
#endif

layout(std430, set = 0, binding = BIND_RELAY) coherent volatile buffer Relay { uint relay_word[]; };

// A poll takes some 0.7 us on an H200: half a second.
#define RELAY_POLLS (1u << 20)
#else
#define RELAY_PUSH
#define HANDED readonly
#endif

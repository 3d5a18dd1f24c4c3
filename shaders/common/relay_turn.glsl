// The functions of common/relay.glsl, which need the push constants.
#if RELAY
void relay_await() {
    if (p.relay_count == 0u) return;
    if (gl_LocalInvocationIndex == 0u) {
        uint polls = 0u;
        while (relay_word[p.relay_before] < p.relay_count && polls < RELAY_POLLS) {
            polls++;
            // Whoever waits behind one that gave up need not wait as long.
            if ((polls & 1023u) == 0u && relay_word[0] != 0u) break;
        }
        if (polls == RELAY_POLLS) relay_word[0] = 1u;
        memoryBarrierBuffer();
    }
    barrier();
#if RELAY_MODE == 1
    memoryBarrierBuffer();
#endif
}

void relay_done() {
    if (p.relay_mine == 0u) return;
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationIndex == 0u) atomicAdd(relay_word[p.relay_mine], 1u);
}
#else
void relay_await() {}
void relay_done() {}
#endif

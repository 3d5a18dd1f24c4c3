// Lets the last workgroup of a dispatch finish the work of all, without a second dispatch.
// Nobody waits, so workgroups need not run at the same time.
//
//   bool last_to_arrive(uint slot, uint count)   true, in all threads, for the last of the `count` workgroups that call with this slot
//
// Every thread calls it, from uniform control flow, after writing its results to `coherent` buffers and before reading those of others. Needs a
// buffer `uint tickets[]`, all zero before the first dispatch; the last workgroup resets its counter, so a recorded program can be replayed.
// The order of arrival must not affect the result: read the others' parts in a fixed order.

shared uint ticket_drawn;

bool last_to_arrive(uint slot, uint count) {
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        const uint drawn = atomicAdd(tickets[slot], 1u);
        if (drawn == count - 1u) tickets[slot] = 0u;
        ticket_drawn = drawn;
    }
    barrier();
    if (ticket_drawn != count - 1u) return false;
    memoryBarrierBuffer();
    return true;
}

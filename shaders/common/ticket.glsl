// The last workgroup to arrive finishes the work of all, in the same dispatch. Nobody waits: workgroups need not run at the same time.
//
//   bool last_to_arrive(uint slot, uint count)   true in the last of `count` workgroups to call it with this slot, in all of its threads
//
// Every thread calls it, from uniform control flow, after writing its results to buffers declared `coherent` and before reading those of
// others. Needs `uint tickets[]` in a buffer, all zero before the first dispatch; the last workgroup puts its counter back to zero, so a
// recorded program can be replayed. The order of arrival must not enter the result: read the parts of others in a fixed order.

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

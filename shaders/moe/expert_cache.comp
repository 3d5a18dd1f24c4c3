#version 450
// EXPERT_CACHE: where in a cache of experts those chosen lie. Experts that are missing get the slots that were used the longest ago.
//
//   binding 0  ids    I32 [CHOSEN]        experts that tokens have chosen
//   binding 1  table  I32, in place       what the cache holds, see below; zeros: nothing
//   binding 2  slots  I32 [CHOSEN]        the slot of each
//   binding 3  moves  I32 [CHOSEN, 2]     (expert, slot) of each expert that must be copied, then (-1, -1)
//
// The table: the number of this run, experts that were wanted so far, those of them that were there, an unused word; then for each expert its slot
// + 1, or 0; for each slot its expert + 1, or 0; for each slot the run that used it last, 0 for an empty one.
//
// One workgroup. All ranks are counted in parallel, so nothing is sorted: a missing expert's rank is the number of missing ones before it, a
// slot's the number of unused slots that were used before it.
//
// Defines: WG_SIZE, N_EXPERT, SLOTS, CHOSEN (at most SLOTS)
layout(local_size_x = WG_SIZE) in;

layout(std430, set = 0, binding = 0) readonly buffer Ids { int ids[]; };
layout(std430, set = 0, binding = 1) buffer Table { uint table[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Slots { int slots[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Moves { ivec2 moves[]; };

#define SLOT_OF 4u
#define EXPERT_OF (SLOT_OF + N_EXPERT)
#define USED_BY (EXPERT_OF + SLOTS)

shared uint last_use[SLOTS];
shared uint wanted[SLOTS];    // 1: a choice of this run lies there
shared uint chosen[CHOSEN];
shared uint place[CHOSEN];    // slot + 1 of each choice
shared uint first[CHOSEN];    // 1: no choice before it is of the same expert
shared uint missing[CHOSEN];  // 1: of those, the ones that must be copied
shared uint victims[CHOSEN];  // by rank

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint run = table[0] + 1u;
    for (uint s = thread; s < SLOTS; s += WG_SIZE) {
        last_use[s] = table[USED_BY + s];
        wanted[s] = 0u;
    }
    for (uint i = thread; i < CHOSEN; i += WG_SIZE) {
        chosen[i] = min(uint(ids[i]), N_EXPERT - 1u);
        place[i] = table[SLOT_OF + chosen[i]];
    }
    barrier();
    for (uint i = thread; i < CHOSEN; i += WG_SIZE) {
        uint same = 0u;
        for (uint j = 0u; j < i; j++) same += uint(chosen[j] == chosen[i]);
        first[i] = uint(same == 0u);
        missing[i] = uint(same == 0u && place[i] == 0u);
        if (place[i] > 0u) wanted[place[i] - 1u] = 1u;
    }
    barrier();
    uint copies = 0u, distinct = 0u;
    for (uint i = 0u; i < CHOSEN; i++) {
        copies += missing[i];
        distinct += first[i];
    }
    for (uint s = thread; s < SLOTS; s += WG_SIZE) {
        if (wanted[s] != 0u) continue;
        uint rank = 0u;
        for (uint t = 0u; t < SLOTS; t++) {
            const bool before = last_use[t] < last_use[s] || (last_use[t] == last_use[s] && t < s);
            rank += uint(wanted[t] == 0u && before);
        }
        if (rank < copies) victims[rank] = s;
    }
    barrier();
    for (uint i = thread; i < CHOSEN; i += WG_SIZE) {
        if (i >= copies) moves[i] = ivec2(-1);
        if (missing[i] == 0u) continue;
        uint rank = 0u;
        for (uint j = 0u; j < i; j++) rank += missing[j];
        const uint slot = victims[rank];
        const uint before = table[EXPERT_OF + slot];
        if (before > 0u) table[SLOT_OF + before - 1u] = 0u;
        table[SLOT_OF + chosen[i]] = slot + 1u;
        table[EXPERT_OF + slot] = chosen[i] + 1u;
        moves[rank] = ivec2(chosen[i], slot);
        place[i] = slot + 1u;
    }
    barrier();
    for (uint i = thread; i < CHOSEN; i += WG_SIZE) {
        uint from = i;
        for (uint j = 0u; j < i; j++) {
            if (chosen[j] == chosen[i]) {
                from = j;
                break;
            }
        }
        const uint slot = place[from] - 1u;
        slots[i] = int(slot);
        if (first[i] != 0u) table[USED_BY + slot] = run;
    }
    if (thread == 0u) {
        table[0] = run;
        table[1] += distinct;
        table[2] += distinct - copies;
    }
}

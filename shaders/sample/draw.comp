#version 450
// SAMPLE, last step: top-k, then top-p, then min-p, all exact; temperature; the draw; the generation loop advances.
//
// Bindings:
//   0  logits   F32 [vocab]
//   1  scratch  see sample/scale.glsl
//   2  tickets  counter TICKET (common/ticket.glsl)
//   3  list     I32 [vocab]: ids of the tokens in bins that may be kept, in any order
//   LOOP_BIND ..  loop, tokens, pos, of columns more: see sample/loop.glsl
// Of columns, logits, scratch, tickets and list are those of one column after those of another.
//
// All workgroups list tokens: workgroup (x, y) reads of column y logits x * WG_SIZE * PER_THREAD .. and reserves one range of the list for all that it keeps.
// The last one to arrive does the rest alone. Each filter is a largest distance from the top logit; three histograms, each of one bin of the
// one before, find it exactly. The order of the list does not matter: sums are integers, and the draw is the largest of -distance / temp +
// noise(seed, pos, id), which has the probabilities of the softmax (Gumbel-max trick).
//
// Defines: PER_THREAD TICKET LOOP_BIND, COLUMNS or DRAFTS 1 or nothing, those of common/reduce.glsl

#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab;
    uint capacity;
#ifdef COLUMNS
    uint n_slots, page, max_pages;
#endif
} p;

layout(binding = 0) readonly buffer Logits { float logits[]; };
layout(binding = 1) coherent buffer Scratch { uint scratch[]; };
layout(binding = 2) coherent buffer Tickets { uint tickets[]; };
layout(binding = 3) coherent buffer List { uint list[]; };

#include "common/ticket.glsl"
#include "sample/loop.glsl"
#include "sample/noise.glsl"
#include "sample/scale.glsl"
#include "sample/search.glsl"
#include "topk/best.glsl"

shared uint group_count, group_begin;
shared uint counts[BINS], deficits[BINS];

void list_tokens(uint tid, float top, uint cut) {
    if (tid == 0) group_count = 0;
    barrier();
    uint ranks[PER_THREAD];
    const uint from = gl_WorkGroupID.x * (WG_SIZE * PER_THREAD) + tid;
    for (uint i = 0; i < PER_THREAD; i++) {
        const uint id = from + i * WG_SIZE;
        ranks[i] = ~0u;
        if (id >= p.vocab) continue;
        const float logit = logits[IN_COLUMN(id, p.vocab)];
        // In a masked text most logits are -inf. They are never drawn, and would only lengthen the list for the one workgroup that reads it.
        const bool eligible = floatBitsToUint(logit) != 0xff800000u && bin_of(distance_of(logit, top), 0) <= cut;
        if (eligible) ranks[i] = atomicAdd(group_count, 1);
    }
    barrier();
    if (tid == 0) group_begin = group_count > 0 ? atomicAdd(scratch[IN_SCRATCH(SCRATCH_LISTED)], group_count) : 0;
    barrier();
    for (uint i = 0; i < PER_THREAD; i++)
        if (ranks[i] != ~0u) list[IN_COLUMN(group_begin + ranks[i], p.vocab)] = from + i * WG_SIZE;
}

// The largest distance to keep: the smallest one for which the listed tokens within it (and within `limit`) number at least `target` or, with
// by_mass, have at least that sum of exp(-distance). With share > 0 the target is share * (the sum of all within `limit`).
uint select_distance(uint tid, uint listed, float top, uint limit, bool by_mass, float share, float target) {
    uint prefix = 0;
    for (uint level = 0; level < LEVELS; level++) {
        for (uint i = tid; i < BINS; i += WG_SIZE) counts[i] = deficits[i] = 0;
        barrier();
        for (uint i = tid; i < listed; i += WG_SIZE) {
            const uint dist = distance_of(logits[IN_COLUMN(list[IN_COLUMN(i, p.vocab)], p.vocab)], top);
            if (dist <= limit && dist >> (27 - 9 * level) == prefix) {
                atomicAdd(counts[bin_of(dist, level)], 1);
                if (by_mass) atomicAdd(deficits[bin_of(dist, level)], deficit_of(dist, level));
            }
        }
        barrier();
        for (uint i = tid; i < BINS; i += WG_SIZE)
            search_value[i] = by_mass ? bin_mass(counts[i], deficits[i], (prefix << 9 | i) << (18 - 9 * level), level) : float(counts[i]);
        barrier();
        const Found found = search(tid, level == 0 ? share : 0.0, target);
        prefix = prefix << 9 | found.bin;
        target = found.rest;
    }
    return prefix;
}

void main() {
    const uint tid = gl_LocalInvocationID.x;
#ifdef MANY_COLUMNS
    if (scratch[IN_SCRATCH(SCRATCH_STATE)] != 0) return;
#else
    if (loop_stopped() || scratch[SCRATCH_STATE] != 0) return;
#endif
    const float top = uintBitsToFloat(scratch[IN_SCRATCH(SCRATCH_TOP)]);
    list_tokens(tid, top, scratch[IN_SCRATCH(SCRATCH_CUT)]);
    if (!last_to_arrive(IN_COLUMN(TICKET, 2u), gl_NumWorkGroups.x)) return;

    const uint listed = scratch[IN_SCRATCH(SCRATCH_LISTED)];
    const float temp = intBitsToFloat(loop_words[IN_LOOP(LOOP_TEMP)]);
    const int top_k = loop_words[IN_LOOP(LOOP_TOP_K)];
    const float top_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_TOP_P)]), min_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_MIN_P)]);
    uint limit = DISTANCE_END - 1;
    if (top_k > 0 && uint(top_k) < listed) limit = select_distance(tid, listed, top, limit, false, 0.0, float(top_k));
    if (top_p < 1.0) {
        const float share = top_k > 0 ? max(top_p, MIN_SHARE) : 0.0;
        limit = min(limit, select_distance(tid, listed, top, limit, true, share, uintBitsToFloat(scratch[IN_SCRATCH(SCRATCH_TARGET)])));
    }
    if (min_p > 0.0) limit = min(limit, distance_limit(min_p));

    const uint seed = uint(loop_words[IN_LOOP(LOOP_SEED)]), at = uint(pos[COLUMN]);
    uvec2 best = NO_CANDIDATE;
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = list[IN_COLUMN(i, p.vocab)];
        const float logit = logits[IN_COLUMN(id, p.vocab)];
        if (distance_of(logit, top) <= limit) best = max_candidate(best, candidate((logit - top) / temp + noise(seed, at, id), id));
    }
    best = wg_max_candidate(best);
    if (tid == 0) loop_advance(int(best.y));
}

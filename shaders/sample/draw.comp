#version 450
// SAMPLE, last step: top-k, then top-p, then min-p, all exact; temperature; the draw; the generation loop advances.
//
// Bindings:
//   0  logits   F32 [vocab]
//   1  scratch  see sample/scale.glsl
//   2  tickets  counter TICKET (common/ticket.glsl)
//   3  list     I32 [vocab]: ids of the tokens in bins that may be kept, in any order
//   LOOP_BIND .. + 2  loop, tokens, pos: see sample/loop.glsl
//
// All workgroups list tokens: workgroup x reads logits x * WG_SIZE * PER_THREAD .. and reserves one range of the list for all that it keeps.
// The last one to arrive does the rest alone. Each filter is a largest distance from the top logit; three histograms, each of one bin of the
// one before, find it exactly. The order of the list does not matter: sums are integers, and the draw is the largest of -distance / temp +
// noise(seed, pos, id), which has the probabilities of the softmax (Gumbel-max trick).
//
// Defines: PER_THREAD TICKET LOOP_BIND, those of common/reduce.glsl

#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab;
    uint capacity;
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
        const float logit = logits[id];
        // In a masked text most logits are -inf. They are never drawn, and would only lengthen the list for the one workgroup that reads it.
        const bool eligible = floatBitsToUint(logit) != 0xff800000u && bin_of(distance_of(logit, top), 0) <= cut;
        if (eligible) ranks[i] = atomicAdd(group_count, 1);
    }
    barrier();
    if (tid == 0) group_begin = group_count > 0 ? atomicAdd(scratch[SCRATCH_LISTED], group_count) : 0;
    barrier();
    for (uint i = 0; i < PER_THREAD; i++)
        if (ranks[i] != ~0u) list[group_begin + ranks[i]] = from + i * WG_SIZE;
}

// The largest distance to keep: the smallest one for which the listed tokens within it (and within `limit`) number at least `target` or, with
// by_mass, have at least that sum of exp(-distance). With share > 0 the target is share * (the sum of all within `limit`).
uint select_distance(uint tid, uint listed, float top, uint limit, bool by_mass, float share, float target) {
    uint prefix = 0;
    for (uint level = 0; level < LEVELS; level++) {
        for (uint i = tid; i < BINS; i += WG_SIZE) counts[i] = deficits[i] = 0;
        barrier();
        for (uint i = tid; i < listed; i += WG_SIZE) {
            const uint dist = distance_of(logits[list[i]], top);
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
    if (loop_stopped() || scratch[SCRATCH_STATE] != 0) return;
    const float top = uintBitsToFloat(scratch[SCRATCH_TOP]);
    list_tokens(tid, top, scratch[SCRATCH_CUT]);
    if (!last_to_arrive(TICKET, gl_NumWorkGroups.x)) return;

    const uint listed = scratch[SCRATCH_LISTED];
    const float temp = intBitsToFloat(loop_words[LOOP_TEMP]);
    const int top_k = loop_words[LOOP_TOP_K];
    const float top_p = intBitsToFloat(loop_words[LOOP_TOP_P]), min_p = intBitsToFloat(loop_words[LOOP_MIN_P]);
    uint limit = DISTANCE_END - 1;
    if (top_k > 0 && uint(top_k) < listed) limit = select_distance(tid, listed, top, limit, false, 0.0, float(top_k));
    if (top_p < 1.0) {
        const float share = top_k > 0 ? max(top_p, MIN_SHARE) : 0.0;
        limit = min(limit, select_distance(tid, listed, top, limit, true, share, uintBitsToFloat(scratch[SCRATCH_TARGET])));
    }
    if (min_p > 0.0) limit = min(limit, distance_limit(min_p));

    const uint seed = uint(loop_words[LOOP_SEED]), at = uint(pos[0]);
    uvec2 best = NO_CANDIDATE;
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = list[i];
        const float logit = logits[id];
        if (distance_of(logit, top) <= limit) best = max_candidate(best, candidate((logit - top) / temp + noise(seed, at, id), id));
    }
    best = wg_max_candidate(best);
    if (tid == 0) loop_advance(int(best.y));
}

#version 450
// SAMPLE, last step: top-k, then top-p, then min-p, all exact; temperature; the draw; the generation loop advances.
//
// Bindings:
//   0  logits   F32 [vocab]
//   1  scratch  see sample/scale.glsl
//   2  tickets  counter TICKET (common/ticket.glsl)
//   3  list     I32 [vocab]: ids of the tokens in bins that may be kept, in any order
//   LOOP_BIND ..  loop, tokens, pos, of columns more: see sample/loop.glsl; with CHAIN then chain, see sample/chain.glsl
// Of columns, logits, scratch, tickets and list are those of one column after those of another.
//
// All workgroups list tokens: workgroup (x, y) reads of column y logits x * WG_SIZE * PER_THREAD .. and reserves one range of the list for all that it keeps.
// The last one to arrive does the rest alone. Each filter is a largest distance from the top logit; three histograms, each of one bin of the
// one before, find it exactly. Of tokens at the distance of the k-th, top-k keeps those with the lowest ids. The order of the list does not matter: sums are integers, and the draw is the largest of -distance / temp +
// noise(seed, pos, id), which has the probabilities of the softmax (Gumbel-max trick).
//
// Defines: PER_THREAD TICKET LOOP_BIND, COLUMNS (and with it PICKS) or DRAFTS 1 or nothing, CHAIN 1: texts may have chains of samplers; those of common/reduce.glsl

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

// Which tokens are kept: distances lo to hi, of those at hi the ids up to `last`.
struct Kept { uint lo; uint hi; uint last; };
Kept kept = Kept(0u, DISTANCE_END - 1u, ~0u);

bool is_kept(uint dist, uint id) {
    return dist >= kept.lo && (dist < kept.hi || (dist == kept.hi && id <= kept.last));
}

// A distance, and by how much the tokens before it fall short of the target.
struct Selected { uint dist; float rest; };

// The smallest distance for which the kept tokens within it number at least `target` or, with by_mass, have at least that sum of
// exp(-distance). With share > 0 the target is share * (the sum of all that are kept).
Selected select_distance(uint tid, uint listed, float top, bool by_mass, float share, float target) {
    uint prefix = 0;
    for (uint level = 0; level < LEVELS; level++) {
        for (uint i = tid; i < BINS; i += WG_SIZE) counts[i] = deficits[i] = 0;
        barrier();
        for (uint i = tid; i < listed; i += WG_SIZE) {
            const uint id = list[IN_COLUMN(i, p.vocab)], dist = distance_of(logits[IN_COLUMN(id, p.vocab)], top);
            if (is_kept(dist, id) && dist >> (27 - 9 * level) == prefix) {
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
    return Selected(prefix, target);
}

// Keeps the nearest of the kept tokens, as many as were counted to find the last one's distance.
void keep_selected(uint tid, uint listed, float top, Selected found) {
    const bool tied = float(counts[found.dist & (BINS - 1u)]) > found.rest;
    barrier();
    const uint before = found.dist == kept.hi ? kept.last : ~0u;
    kept = Kept(kept.lo, found.dist, before);
    if (!tied) return;
    // The id of the last one, nine bits after nine.
    uint prefix = 0u;
    float rest = found.rest;
    for (uint level = 0u; level < 2u; level++) {
        for (uint i = tid; i < BINS; i += WG_SIZE) counts[i] = 0u;
        barrier();
        for (uint i = tid; i < listed; i += WG_SIZE) {
            const uint id = list[IN_COLUMN(i, p.vocab)];
            if (id > before || distance_of(logits[IN_COLUMN(id, p.vocab)], top) != found.dist || id >> (18u - 9u * level) != prefix) continue;
            atomicAdd(counts[id >> (9u - 9u * level) & (BINS - 1u)], 1u);
        }
        barrier();
        for (uint i = tid; i < BINS; i += WG_SIZE) search_value[i] = float(counts[i]);
        barrier();
        const Found last = search(tid, 0.0, rest);
        prefix = prefix << 9u | last.bin;
        rest = last.rest;
    }
    kept.last = prefix;
}

#ifdef CHAIN
#include "sample/chain.glsl"
#include "sample/chain_filters.glsl"
#endif

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
#ifdef CHAIN
    const bool chained = chain_word(CHAIN_COUNT) > 0.0;
    const float scale = run_chain(tid, listed, top, uintBitsToFloat(scratch[IN_SCRATCH(SCRATCH_TARGET)]), chained);
#else
    const bool chained = false;
    const float scale = 1.0;
    const int top_k = loop_words[IN_LOOP(LOOP_TOP_K)];
    const float top_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_TOP_P)]), min_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_MIN_P)]);
    if (top_k > 0 && uint(top_k) < listed)
        keep_selected(tid, listed, top, select_distance(tid, listed, top, false, 0.0, float(top_k)));
    if (top_p < 1.0) {
        const float share = top_k > 0 ? max(top_p, MIN_SHARE) : 0.0;
        const uint dist = select_distance(tid, listed, top, true, share, uintBitsToFloat(scratch[IN_SCRATCH(SCRATCH_TARGET)])).dist;
        if (dist < kept.hi) kept = Kept(0u, dist, ~0u);
    }
    if (min_p > 0.0 && distance_limit(min_p) < kept.hi) kept = Kept(0u, distance_limit(min_p), ~0u);
#endif

    const uint seed = uint(loop_words[IN_LOOP(LOOP_SEED)]), at = uint(pos[COLUMN]);
    uvec2 best = NO_CANDIDATE;
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = list[IN_COLUMN(i, p.vocab)];
        const float logit = logits[IN_COLUMN(id, p.vocab)];
        const float score = chained ? (logit - top) * scale : (logit - top) / temp;
        if (is_kept(distance_of(logit, top), id)) best = max_candidate(best, candidate(score + noise(seed, at, id), id));
    }
    best = wg_max_candidate(best);
#ifdef CHAIN
    if (chained) note_surprise(tid, listed, top, scale, best.y);
#endif
    if (tid == 0) loop_advance(int(best.y));
}

#version 450
// SAMPLE, second step: a histogram of the tokens' distances from the largest logit, and the last bin that the filters can keep.
//
// Bindings:
//   0  logits   F32 [vocab]
//   1  scratch  see sample/scale.glsl: workgroups add to the bins of level 0; the last one to arrive writes the last bin that can be kept
//   2  tickets  counter TICKET (common/ticket.glsl)
//   LOOP_BIND ..  loop, tokens, pos, of columns more: see sample/loop.glsl (only the sampler's parameters are read); with CHAIN then chain, see sample/chain.glsl
// Of columns, logits, scratch and tickets are those of one column after those of another.
//
// Workgroup (x, y) counts of column y logits x * WG_SIZE * PER_THREAD .. in shared memory; neighbouring threads read neighbouring logits.
//
// Defines: PER_THREAD TICKET LOOP_BIND, COLUMNS (and with it PICKS) or DRAFTS 1 or nothing, CHAIN 1: texts may have chains of samplers; those of common/reduce.glsl

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

#include "common/ticket.glsl"
#include "sample/loop.glsl"
#include "sample/scale.glsl"
#include "sample/search.glsl"
#ifdef CHAIN
#include "sample/chain.glsl"
#endif

shared uint counts[BINS], deficits[BINS];

void main() {
    const uint tid = gl_LocalInvocationID.x;
#ifdef MANY_COLUMNS
    if (scratch[IN_SCRATCH(SCRATCH_STATE)] != 0) return;
#else
    if (loop_stopped() || scratch[SCRATCH_STATE] != 0) return;
#endif
    const float top = uintBitsToFloat(scratch[IN_SCRATCH(SCRATCH_TOP)]);
    for (uint i = tid; i < BINS; i += WG_SIZE) counts[i] = deficits[i] = 0;
    barrier();
    for (uint i = 0; i < PER_THREAD; i++) {
        const uint id = gl_WorkGroupID.x * (WG_SIZE * PER_THREAD) + i * WG_SIZE + tid;
        if (id < p.vocab) {
            const uint dist = distance_of(logits[IN_COLUMN(id, p.vocab)], top);
            atomicAdd(counts[bin_of(dist, 0)], 1);
            atomicAdd(deficits[bin_of(dist, 0)], deficit_of(dist, 0));
        }
    }
    barrier();
    for (uint i = tid; i < BINS; i += WG_SIZE) {
        if (counts[i] > 0) {
            atomicAdd(scratch[IN_SCRATCH(SCRATCH_COUNTS + i)], counts[i]);
            atomicAdd(scratch[IN_SCRATCH(SCRATCH_DEFICITS + i)], deficits[i]);
        }
    }
    if (!last_to_arrive(IN_COLUMN(TICKET, 2u), gl_NumWorkGroups.x)) return;

    const int top_k = loop_words[IN_LOOP(LOOP_TOP_K)];
    const float top_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_TOP_P)]), min_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_MIN_P)]);
    uint cut = BINS - 1;
    float target = 0.0;
    bool by_count = top_k > 0, by_mass = top_k <= 0 && top_p < 1.0;
    // Top-p after top-k needs the sum of all that top-k keeps, so min-p must not shorten the list then.
    bool by_share = min_p > 0.0 && !(top_k > 0 && top_p < 1.0);
#ifdef CHAIN
    const uint samplers = uint(chain_word(CHAIN_COUNT));
    if (samplers > 0u) {
        // What lies behind a sampler that needs the sum of all before it must not shorten the list.
        by_count = by_share = false;
        by_mass = int(chain_word(CHAIN_ORDER)) == TOP_P;
        for (uint i = 0u; i < samplers && !by_mass; i++) {
            const int kind = int(chain_word(CHAIN_ORDER + i));
            if (kind != TOP_K && kind != MIN_P) break;
            by_count = by_count || kind == TOP_K;
            by_share = by_share || kind == MIN_P;
        }
    }
#endif
    if (by_count) {
        for (uint i = tid; i < BINS; i += WG_SIZE) search_value[i] = float(scratch[IN_SCRATCH(SCRATCH_COUNTS + i)]);
        barrier();
        cut = search(tid, 0.0, float(top_k)).bin;
    } else if (by_mass) {
        for (uint i = tid; i < BINS; i += WG_SIZE)
            search_value[i] = bin_mass(scratch[IN_SCRATCH(SCRATCH_COUNTS + i)], scratch[IN_SCRATCH(SCRATCH_DEFICITS + i)], i << 18, 0);
        barrier();
        const Found found = search(tid, max(top_p, MIN_SHARE), 0.0);
        cut = found.bin;
        target = found.target;
    }
    if (by_share) cut = min(cut, bin_of(distance_limit(min_p), 0));
    if (tid == 0) {
        scratch[IN_SCRATCH(SCRATCH_CUT)] = cut;
        scratch[IN_SCRATCH(SCRATCH_TARGET)] = floatBitsToUint(target);
    }
}

// The choice of experts, TOPK_MOE, by all threads of one workgroup: the USED largest of N_EXPERT logits, and their weights.
//
//   fetch_logits    loads the logits; issue other loads between this and the next, so that their latencies overlap
//   choose_experts  puts the experts' ids into chosen_id[0 .. USED), largest logit first, for every thread to read. Its barriers also cover
//                   what was written to shared memory before the call
//   store_chosen    stores ids and weights
//
// An expert's rank is the number of logits that come before its own: one pass over shared memory, however many experts are used, with no
// barrier inside. With threads to spare, up to 8 neighbours share the counting for one expert. More than BLOCK experts are first ranked within
// blocks of BLOCK; the first of each block, the candidates, are then ranked among themselves.
//
// Experts are ordered by their logits. With SELECT_BIAS 1, or groups by GROUP_TOP 2, they are ordered by sigmoid(logit), or with GATE 0 and 1 by
// their softmax over all, (+ SELECTION_BIAS(e) of the includer); the bias does not enter the weights. With N_GROUP > 1, groups of neighbouring experts are chosen first: the GROUPS_USED groups
// with the largest best expert (GROUP_TOP 1) or sum of the two best (GROUP_TOP 2), of equals the lower group.
// Only their experts can then be chosen.
//
// The includer has common/reduce.glsl, LOGIT(token, e), and buffers `float chosen_weights[]` and `int chosen_ids[]`, USED per token.
// Defines: N_EXPERT USED BLOCK, GATE (0: softmax over the chosen; 1: softmax over all; 2: sigmoid; 3: sigmoid divided by its sum over the
// chosen), SELECT_BIAS, N_GROUP GROUPS_USED GROUP_TOP. GROUP_TOP 2 requires GATE 2 or 3; a softmax
// with SELECT_BIAS, N_GROUP 1

#include "topk/best.glsl"

#define BLOCKS ((N_EXPERT + BLOCK - 1) / BLOCK)
// Ordered by values from which the logits cannot be recovered.
#define BY_SELECTION (SELECT_BIAS || (N_GROUP > 1 && GROUP_TOP == 2))
#define SOFTMAX_SELECTION (SELECT_BIAS && GATE < 2)
#define BLOCK_CANDIDATES (USED < BLOCK ? USED : BLOCK)
#define CANDIDATES (BLOCKS > 1 ? BLOCKS * BLOCK_CANDIDATES : 0)
#define LOGITS_EACH ((BLOCKS * BLOCK + WG_SIZE - 1) / WG_SIZE)

// Lower bound of the sum of weights that divides: 2^-14, the smallest normal F16. A softmax over at most 16384 experts is always above it, unless
// a bias chose others than the largest.
const float MIN_SUM = 6.103515625e-5;

// Keys in quads: first those of the experts, then those of the candidates. Keys past the end of either are 0, which comes before nothing.
#define KEY_QUADS (BLOCKS * BLOCK / 4)
#define CANDIDATE_QUADS ((CANDIDATES + 3) / 4)
shared uvec4 keys[KEY_QUADS + CANDIDATE_QUADS];
shared uint chosen_key[USED];
shared uint chosen_id[USED];
#if BY_SELECTION
shared float chosen_logit[USED];
#endif
#if N_GROUP > 1
shared float group_score[N_GROUP];
#endif
#if BLOCKS > 1
shared uint candidate_ids[CANDIDATES];
#endif

// Threads that share the counting for one of `many`.
#if REDUCE_SUBGROUP && REDUCE_GROUPS
#define RANK_THREADS(many) (WG_SIZE >= 8 * (many) ? 8u : WG_SIZE >= 4 * (many) ? 4u : WG_SIZE >= 2 * (many) ? 2u : 1u)
#define SUM_OVER_THREADS(v, threads) group_sum(v, threads)
#else
#define RANK_THREADS(many) 1u
#define SUM_OVER_THREADS(v, threads) (v)
#endif

float own_logits[LOGITS_EACH];

void fetch_logits(uint tid, uint token) {
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) own_logits[j] = LOGIT(token, min(tid + j * WG_SIZE, N_EXPERT - 1u));
}

// The logit from which `candidate` made a key, except for the sign of zero.
float logit_of(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key);
}

uint count_of(bvec4 four) {
    const uvec4 count = uvec4(four);
    return (count.x + count.y) + (count.z + count.w);
}

// The rank of key number i, `mine`, in a list of `quads` quads from keys[first] on: how many keys are larger, plus how many equal ones have
// lower numbers. `threads` neighbouring threads call together; each counts in every threads-th quad, and all get the sum.
uint rank_of(uint first, uint quads, uint i, uint mine, uint threads, uint thread) {
    // At most eight loads in flight.
    const uint steps = (quads + threads - 1u) / threads, at_once = steps < 8u ? steps : 8u;
    uint rank = 0;
    for (uint from = 0; from < steps; from += at_once)
        [[unroll]] for (uint j = 0; j < at_once; j++) {
            const uint q = (from + j) * threads + thread;
            if (quads % (at_once * threads) != 0 && q >= quads) continue;
            // Equal keys at lower numbers count, too: they are above mine - 1 (an expert's key is never 0).
            // The expert's own quad is treated below.
            rank += count_of(greaterThan(keys[first + q], uvec4(q < i >> 2 ? mine - 1u : mine)));
        }
    rank = SUM_OVER_THREADS(rank, threads);
    const bvec4 equals = equal(keys[first + (i >> 2)], uvec4(mine)), lower = lessThan(uvec4(0, 1, 2, 3), uvec4(i & 3u));
    return rank + count_of(bvec4(uvec4(equals) * uvec4(lower)));
}

#if SOFTMAX_SELECTION
float logit_max, exp_sum;  // of all experts: their largest logit, and the sum of exp(logit - logit_max)
#endif

// The value by which experts are ordered.
float selection(float logit, uint e) {
#if SOFTMAX_SELECTION
    return exp(logit - logit_max) / exp_sum + SELECTION_BIAS(min(e, N_EXPERT - 1u));
#elif BY_SELECTION && SELECT_BIAS
    return 1.0 / (1.0 + exp(-logit)) + SELECTION_BIAS(min(e, N_EXPERT - 1u));
#elif BY_SELECTION
    return 1.0 / (1.0 + exp(-logit));
#else
    return logit;
#endif
}

#if N_GROUP > 1
#define GROUP_SIZE (N_EXPERT / N_GROUP)
// The key of an expert whose group was not chosen: lower than that of any number.
const uint EXCLUDED = 1u;

// Chooses groups: the experts of all others get the key EXCLUDED. One thread per group.
void choose_groups(uint tid) {
    for (uint g = tid; g < N_GROUP; g += WG_SIZE) {
        uvec2 top = uvec2(0u);
        for (uint i = 0; i < GROUP_SIZE; i++) {
            const uint e = g * GROUP_SIZE + i, key = keys[e >> 2][e & 3u];
            top = key > top.x ? uvec2(key, top.x) : uvec2(top.x, max(top.y, key));
        }
        group_score[g] = GROUP_TOP == 2 ? logit_of(top.x) + logit_of(top.y) : logit_of(top.x);
    }
    barrier();
    for (uint g = tid; g < N_GROUP; g += WG_SIZE) {
        uint rank = 0;
        const float mine = group_score[g];
        for (uint other = 0; other < N_GROUP; other++) rank += uint(group_score[other] > mine || (group_score[other] == mine && other < g));
        if (rank >= GROUPS_USED)
            for (uint i = 0; i < GROUP_SIZE; i++) {
                const uint e = g * GROUP_SIZE + i;
                keys[e >> 2][e & 3u] = EXCLUDED;
            }
    }
    barrier();
}
#endif

void choose_experts(uint tid) {
#if SOFTMAX_SELECTION
    float largest = own_logits[0];
    [[unroll]] for (uint j = 1; j < LOGITS_EACH; j++) largest = max(largest, own_logits[j]);
    logit_max = wg_max(largest);
    exp_sum = 0.0;
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) exp_sum += tid + j * WG_SIZE < N_EXPERT ? exp(own_logits[j] - logit_max) : 0.0;
    exp_sum = wg_sum(exp_sum);
#endif
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) {
        const uint e = tid + j * WG_SIZE;
        if (e < BLOCKS * BLOCK) keys[e >> 2][e & 3u] = e < N_EXPERT ? candidate(selection(own_logits[j], e), e).x : 0u;
    }
    for (uint q = KEY_QUADS + tid; q < KEY_QUADS + CANDIDATE_QUADS; q += WG_SIZE) keys[q] = uvec4(0u);
    barrier();
#if N_GROUP > 1
    choose_groups(tid);
#endif

    const uint threads = RANK_THREADS(N_EXPERT);
    for (uint t = tid; t < N_EXPERT * threads; t += WG_SIZE) {
        const uint e = t / threads, mine = keys[e >> 2][e & 3u];
        const uint rank = rank_of(e / BLOCK * (BLOCK / 4), BLOCK / 4, e % BLOCK, mine, threads, t % threads);
        if (rank < BLOCK_CANDIDATES && t % threads == 0) {
#if BLOCKS > 1
            const uint c = e / BLOCK * BLOCK_CANDIDATES + rank;
            keys[KEY_QUADS + (c >> 2)][c & 3u] = mine;
            candidate_ids[c] = e;
#else
            chosen_key[rank] = mine;
            chosen_id[rank] = e;
#endif
        }
    }
    barrier();
#if BLOCKS > 1
    // Among equals, a block's candidates are in the order of their ids, and so are the blocks: the candidate's number breaks ties here, too.
    const uint candidate_threads = RANK_THREADS(CANDIDATES);
    for (uint t = tid; t < CANDIDATES * candidate_threads; t += WG_SIZE) {
        const uint c = t / candidate_threads, mine = keys[KEY_QUADS + (c >> 2)][c & 3u];
        const uint rank = rank_of(KEY_QUADS, CANDIDATE_QUADS, c, mine, candidate_threads, t % candidate_threads);
        if (mine != 0 && rank < USED && t % candidate_threads == 0) {
            chosen_key[rank] = mine;
            chosen_id[rank] = candidate_ids[c];
        }
    }
    barrier();
#endif
}

#if BY_SELECTION
#define CHOSEN_LOGIT(i) chosen_logit[i]
#else
#define CHOSEN_LOGIT(i) logit_of(chosen_key[i])
#endif

void store_chosen(uint tid, uint token, float scale) {
#if BY_SELECTION
    for (uint i = tid; i < USED; i += WG_SIZE) chosen_logit[i] = LOGIT(token, chosen_id[i]);
    barrier();
#endif
#if SOFTMAX_SELECTION
    const float highest = logit_max;
#else
    const float highest = CHOSEN_LOGIT(0);  // also with groups: the best expert of all is in a chosen group
#endif
#if GATE == 1 && SOFTMAX_SELECTION
    const float sum = exp_sum;
#elif GATE == 1
    float sum = 0.0;
  #if N_GROUP > 1
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) sum += tid + j * WG_SIZE < N_EXPERT ? exp(own_logits[j] - highest) : 0.0;
  #else
    for (uint e = tid; e < N_EXPERT; e += WG_SIZE) sum += exp(logit_of(keys[e >> 2][e & 3]) - highest);
  #endif
    sum = wg_sum(sum);
#endif
    for (uint i = tid; i < USED; i += WG_SIZE) {
        const float logit = CHOSEN_LOGIT(i);
#if GATE < 2
        float weight = exp(logit - highest);
#else
        float weight = 1.0 / (1.0 + exp(-logit));
#endif
#if GATE == 0
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += exp(CHOSEN_LOGIT(j) - highest);
  #if SOFTMAX_SELECTION
        sum = max(sum, MIN_SUM * exp_sum);
  #endif
#elif GATE == 3
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += 1.0 / (1.0 + exp(-CHOSEN_LOGIT(j)));
        sum = max(sum, MIN_SUM);
#endif
#if GATE != 2
        weight /= sum;
#endif
        chosen_weights[token * USED + i] = weight * scale;
        chosen_ids[token * USED + i] = int(chosen_id[i]);
    }
}

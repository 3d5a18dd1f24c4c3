// The choice of experts, by all threads of one workgroup: the USED largest of N_EXPERT logits and their weights (TOPK_MOE).
//
//   fetch_logits    asks for the logits; what else a kernel waits for it best asks for between this and the next
//   choose_experts  makes chosen_id[0 .. USED) the experts' ids, largest logit first, for every thread to read. Its barriers serve for whatever
//                   was written to shared memory before it
//   store_chosen    ids and weights to memory
//
// An expert's place is the number of logits before it, counted in one pass over shared memory with no dependence on USED and no barrier; where
// there are threads enough, up to 8 neighbours count for one. More than BLOCK experts are first counted within blocks of BLOCK; the first of
// each block, the candidates, are then counted among themselves.
//
// Experts are ordered by their logits. With SELECT_BIAS 1, or with groups by two, by the logistic function of them, plus SELECTION_BIAS(e) of the
// includer; the bias takes no part in the weights. With N_GROUP > 1 groups of neighbouring experts are chosen first: the GROUPS_USED with the largest
// best expert (GROUP_TOP 1), or sum of the two best (GROUP_TOP 2), of equals the lower group; only their experts count then.
//
// The includer has common/reduce.glsl, LOGIT(token, e), and buffers `float chosen_weights[]` and `int chosen_ids[]`, USED for each token.
// Defines: N_EXPERT USED BLOCK, GATE (0: softmax over the chosen; 1: softmax over all; 2: sigmoid; 3: sigmoid divided by its sum), SELECT_BIAS, N_GROUP GROUPS_USED
// GROUP_TOP. SELECT_BIAS and GROUP_TOP 2 go with GATE 2 and 3 alone

#include "topk/best.glsl"

#define BLOCKS ((N_EXPERT + BLOCK - 1) / BLOCK)
// The order is that of values which do not tell the logits.
#define BY_VALUE (SELECT_BIAS || (N_GROUP > 1 && GROUP_TOP == 2))
#define KEPT (USED < BLOCK ? USED : BLOCK)
#define CANDIDATES (BLOCKS > 1 ? BLOCKS * KEPT : 0)
#define LOGITS_EACH ((BLOCKS * BLOCK + WG_SIZE - 1) / WG_SIZE)

// The smallest sum of weights that divides: 2^-14, the smallest normal F16. A softmax over at most 16384 experts is always above it.
const float LEAST_SUM = 6.103515625e-5;

// Keys in fours, first the experts', then the candidates'; those after the last of either are 0, which is before nothing.
#define KEY_QUADS (BLOCKS * BLOCK / 4)
#define CANDIDATE_QUADS ((CANDIDATES + 3) / 4)
shared uvec4 keys[KEY_QUADS + CANDIDATE_QUADS];
shared uint chosen_key[USED];
shared uint chosen_id[USED];
#if BY_VALUE
shared float chosen_logit[USED];
#endif
#if N_GROUP > 1
shared float group_score[N_GROUP];
#endif
#if BLOCKS > 1
shared uint candidate_ids[CANDIDATES];
#endif

// Threads that count for one of `many`.
#if REDUCE_SUBGROUP && REDUCE_GROUPS
#define SHARE(many) (WG_SIZE >= 8 * (many) ? 8u : WG_SIZE >= 4 * (many) ? 4u : WG_SIZE >= 2 * (many) ? 2u : 1u)
#define SUM_OF_SHARES(v, share) group_sum(v, share)
#else
#define SHARE(many) 1u
#define SUM_OF_SHARES(v, share) (v)
#endif

float own_logits[LOGITS_EACH];

void fetch_logits(uint tid, uint token) {
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) own_logits[j] = LOGIT(token, min(tid + j * WG_SIZE, N_EXPERT - 1u));
}

// What `candidate` made a key of, but for the sign of a zero.
float logit_of(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key);
}

uint count_of(bvec4 four) {
    const uvec4 count = uvec4(four);
    return (count.x + count.y) + (count.z + count.w);
}

// How many keys of a list come before `mine`, its number i: those above it and, of those at lower numbers, its equals. The list is `quads` fours
// from keys[first] on. `share` neighbouring threads call together, each counts every share-th four and gets the sum.
uint place_of(uint first, uint quads, uint i, uint mine, uint share, uint sharer) {
    // At most eight loads are under way at once.
    const uint steps = (quads + share - 1u) / share, at_once = steps < 8u ? steps : 8u;
    uint place = 0;
    for (uint from = 0; from < steps; from += at_once)
        [[unroll]] for (uint j = 0; j < at_once; j++) {
            const uint q = (from + j) * share + sharer;
            if (quads % (at_once * share) != 0 && q >= quads) continue;
            // Equals at lower numbers are above mine - 1 (no expert's key is 0); in its own four they are told apart below.
            place += count_of(greaterThan(keys[first + q], uvec4(q < i >> 2 ? mine - 1u : mine)));
        }
    place = SUM_OF_SHARES(place, share);
    const bvec4 equals = equal(keys[first + (i >> 2)], uvec4(mine)), lower = lessThan(uvec4(0, 1, 2, 3), uvec4(i & 3u));
    return place + count_of(bvec4(uvec4(equals) * uvec4(lower)));
}

// What experts are ordered by.
float selection(float logit, uint e) {
#if BY_VALUE && SELECT_BIAS
    return 1.0 / (1.0 + exp(-logit)) + SELECTION_BIAS(min(e, N_EXPERT - 1u));
#elif BY_VALUE
    return 1.0 / (1.0 + exp(-logit));
#else
    return logit;
#endif
}

#if N_GROUP > 1
#define GROUP_SIZE (N_EXPERT / N_GROUP)
// The lowest key of all: an expert of a group that was not chosen. A number's keys are larger.
const uint LEFT_OUT = 1u;

// Leaves the keys of the best groups' experts as they are. A thread takes a group.
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
        uint place = 0;
        const float mine = group_score[g];
        for (uint other = 0; other < N_GROUP; other++) place += uint(group_score[other] > mine || (group_score[other] == mine && other < g));
        if (place >= GROUPS_USED)
            for (uint i = 0; i < GROUP_SIZE; i++) {
                const uint e = g * GROUP_SIZE + i;
                keys[e >> 2][e & 3u] = LEFT_OUT;
            }
    }
    barrier();
}
#endif

void choose_experts(uint tid) {
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) {
        const uint e = tid + j * WG_SIZE;
        if (e < BLOCKS * BLOCK) keys[e >> 2][e & 3u] = e < N_EXPERT ? candidate(selection(own_logits[j], e), e).x : 0u;
    }
    for (uint q = KEY_QUADS + tid; q < KEY_QUADS + CANDIDATE_QUADS; q += WG_SIZE) keys[q] = uvec4(0u);
    barrier();
#if N_GROUP > 1
    choose_groups(tid);
#endif

    const uint share = SHARE(N_EXPERT);
    for (uint t = tid; t < N_EXPERT * share; t += WG_SIZE) {
        const uint e = t / share, mine = keys[e >> 2][e & 3u];
        const uint place = place_of(e / BLOCK * (BLOCK / 4), BLOCK / 4, e % BLOCK, mine, share, t % share);
        if (place < KEPT && t % share == 0) {
#if BLOCKS > 1
            const uint c = e / BLOCK * KEPT + place;
            keys[KEY_QUADS + (c >> 2)][c & 3u] = mine;
            candidate_ids[c] = e;
#else
            chosen_key[place] = mine;
            chosen_id[place] = e;
#endif
        }
    }
    barrier();
#if BLOCKS > 1
    // A block's first keep the order of their ids among equals, and so do the blocks: the number decides between equals here too.
    const uint candidate_share = SHARE(CANDIDATES);
    for (uint t = tid; t < CANDIDATES * candidate_share; t += WG_SIZE) {
        const uint c = t / candidate_share, mine = keys[KEY_QUADS + (c >> 2)][c & 3u];
        const uint place = place_of(KEY_QUADS, CANDIDATE_QUADS, c, mine, candidate_share, t % candidate_share);
        if (mine != 0 && place < USED && t % candidate_share == 0) {
            chosen_key[place] = mine;
            chosen_id[place] = candidate_ids[c];
        }
    }
    barrier();
#endif
}

#if BY_VALUE
#define CHOSEN_LOGIT(i) chosen_logit[i]
#else
#define CHOSEN_LOGIT(i) logit_of(chosen_key[i])
#endif

void store_chosen(uint tid, uint token, float scale) {
#if BY_VALUE
    for (uint i = tid; i < USED; i += WG_SIZE) chosen_logit[i] = LOGIT(token, chosen_id[i]);
    barrier();
#endif
    const float highest = CHOSEN_LOGIT(0);  // of groups by their best expert, the first has the largest of all
#if GATE == 1
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
#elif GATE == 3
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += 1.0 / (1.0 + exp(-CHOSEN_LOGIT(j)));
        sum = max(sum, LEAST_SUM);
#endif
#if GATE != 2
        weight /= sum;
#endif
        chosen_weights[token * USED + i] = weight * scale;
        chosen_ids[token * USED + i] = int(chosen_id[i]);
    }
}

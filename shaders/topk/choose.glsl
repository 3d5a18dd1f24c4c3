// The choice of experts, by all threads of one workgroup: the USED largest of EXPERTS logits and their weights (TOPK_MOE).
//
//   fetch_logits    asks for the logits; what else a kernel waits for it best asks for between this and the next
//   choose_experts  makes chosen_id[0 .. USED) the experts' ids, largest logit first, for every thread to read. Its barriers serve for whatever
//                   was written to shared memory before it
//   store_chosen    ids and weights to memory
//
// An expert's place is the number of logits before it: a thread counts them in one pass over shared memory, with no dependence on USED and no
// barrier. More than BLOCK experts are first counted within blocks of BLOCK; the first of each block are then counted among themselves.
//
// The includer has common/reduce.glsl, LOGIT(token, e), and buffers `float chosen_weights[]` and `int chosen_ids[]`, USED for each token.
// Defines: EXPERTS USED BLOCK, GATE (0: softmax over the chosen; 1: softmax over all; 2: sigmoid; 3: sigmoid divided by its sum)

#include "topk/best.glsl"

#define BLOCKS ((EXPERTS + BLOCK - 1) / BLOCK)
#define KEPT (USED < BLOCK ? USED : BLOCK)
#define CANDIDATES (BLOCKS * KEPT)
#define LOGITS_EACH ((BLOCKS * BLOCK + WG_SIZE - 1) / WG_SIZE)

// The smallest sum of weights that divides: 2^-14, the smallest normal F16. A softmax over at most 16384 experts is always above it.
const float LEAST_SUM = 6.103515625e-5;

// Keys in fours; the places after the last expert hold 0, which is before nothing.
shared uvec4 keys[BLOCKS * BLOCK / 4];
shared uint chosen_key[USED];
shared uint chosen_id[USED];
#if BLOCKS > 1
shared uvec4 block_keys[(CANDIDATES + 3) / 4];
shared uint block_ids[CANDIDATES];
#endif

float own_logits[LOGITS_EACH];

void fetch_logits(uint tid, uint token) {
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) own_logits[j] = LOGIT(token, min(tid + j * WG_SIZE, EXPERTS - 1u));
}

// What `candidate` made a key of, but for the sign of a zero.
float logit_of(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key);
}

void choose(uint place, uint key, uint id) {
    if (place < USED) {
        chosen_key[place] = key;
        chosen_id[place] = id;
    }
}

// How many of the four keys at 4 * q come before key `mine` at place i of the same list: those above it and, of those at lower places, its
// equals. Only its own four must be told apart; no expert's key is 0, so that 1 can be subtracted.
uint before(uvec4 four, uint q, uint mine, uint i) {
    uvec4 count = uvec4(greaterThan(four, uvec4(q < i >> 2 ? mine - 1u : mine)));
    return (count.x + count.y) + (count.z + count.w);
}

uint equals_before(uvec4 own_four, uint mine, uint i) {
    const uvec4 count = uvec4(equal(own_four, uvec4(mine))) * uvec4(lessThan(uvec4(0, 1, 2, 3), uvec4(i & 3u)));
    return (count.x + count.y) + (count.z + count.w);
}

void choose_experts(uint tid) {
    [[unroll]] for (uint j = 0; j < LOGITS_EACH; j++) {
        const uint e = tid + j * WG_SIZE;
        if (e < BLOCKS * BLOCK) keys[e >> 2][e & 3] = e < EXPERTS ? candidate(own_logits[j], e).x : 0u;
    }
#if BLOCKS > 1
    for (uint c = tid; c < (CANDIDATES + 3) / 4 * 4; c += WG_SIZE) block_keys[c >> 2][c & 3] = 0;
#endif
    barrier();

    for (uint e = tid; e < EXPERTS; e += WG_SIZE) {
        const uint first = e / BLOCK * (BLOCK / 4), i = e % BLOCK, mine = keys[e >> 2][e & 3];
        uint place = equals_before(keys[e >> 2], mine, i);
        for (uint q = 0; q < BLOCK / 4; q++) place += before(keys[first + q], q, mine, i);
#if BLOCKS > 1
        if (place < KEPT) {
            const uint c = e / BLOCK * KEPT + place;
            block_keys[c >> 2][c & 3] = mine;
            block_ids[c] = e;
        }
    }
    barrier();
    // A block's first keep the order of their ids among equals, and so do the blocks: the index decides between equals here too.
    for (uint c = tid; c < CANDIDATES; c += WG_SIZE) {
        const uint mine = block_keys[c >> 2][c & 3];
        if (mine == 0) continue;
        uint place = equals_before(block_keys[c >> 2], mine, c);
        for (uint q = 0; q < (CANDIDATES + 3) / 4; q++) place += before(block_keys[q], q, mine, c);
        choose(place, mine, block_ids[c]);
    }
#else
        choose(place, mine, e);
    }
#endif
    barrier();
}

void store_chosen(uint tid, uint token, float scale) {
    const float highest = logit_of(chosen_key[0]);
#if GATE == 1
    float sum = 0.0;
    for (uint e = tid; e < EXPERTS; e += WG_SIZE) sum += exp(logit_of(keys[e >> 2][e & 3]) - highest);
    sum = wg_sum(sum);
#endif
    for (uint i = tid; i < USED; i += WG_SIZE) {
        const float logit = logit_of(chosen_key[i]);
#if GATE < 2
        float weight = exp(logit - highest);
#else
        float weight = 1.0 / (1.0 + exp(-logit));
#endif
#if GATE == 0
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += exp(logit_of(chosen_key[j]) - highest);
#elif GATE == 3
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += 1.0 / (1.0 + exp(-logit_of(chosen_key[j])));
        sum = max(sum, LEAST_SUM);
#endif
#if GATE != 2
        weight /= sum;
#endif
        chosen_weights[token * USED + i] = weight * scale;
        chosen_ids[token * USED + i] = int(chosen_id[i]);
    }
}

// The choice of experts, by all threads of one workgroup: the USED largest of EXPERTS logits and their weights (TOPK_MOE).
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

// The smallest sum of weights that divides: 2^-14, the smallest normal F16. A softmax over at most 16384 experts is always above it.
const float LEAST_SUM = 6.103515625e-5;

// Keys in fours; the places after the last expert hold 0, which is before nothing.
shared uvec4 keys[BLOCKS * BLOCK / 4];
shared float logit[EXPERTS];
shared float chosen_logit[USED];
shared uint chosen_id[USED];
#if BLOCKS > 1
shared uvec4 block_keys[(CANDIDATES + 3) / 4];
shared uint block_ids[CANDIDATES];
#endif

void choose(uint place, uint id) {
    if (place < USED) {
        chosen_logit[place] = logit[id];
        chosen_id[place] = id;
    }
}

// How many of four keys at index 4 * q come before key `mine` at index i. Keys stay below 2^32 - 1, so adding 1 is safe.
uint before(uvec4 four, uint q, uint mine, uint i) {
    const uvec4 index = 4 * q + uvec4(0, 1, 2, 3);
    const uvec4 count = uvec4(greaterThan(four + uvec4(lessThan(index, uvec4(i))), uvec4(mine)));
    return count.x + count.y + count.z + count.w;
}

void choose_experts(uint tid, uint token, float scale) {
    for (uint e = tid; e < BLOCKS * BLOCK; e += WG_SIZE) {
        uint key = 0;
        if (e < EXPERTS) {
            logit[e] = LOGIT(token, e);
            key = candidate(logit[e], e).x;
        }
        keys[e >> 2][e & 3] = key;
    }
#if BLOCKS > 1
    for (uint c = tid; c < (CANDIDATES + 3) / 4 * 4; c += WG_SIZE) block_keys[c >> 2][c & 3] = 0;
#endif
    barrier();

    for (uint e = tid; e < EXPERTS; e += WG_SIZE) {
        const uint block = e / BLOCK, mine = keys[e >> 2][e & 3];
        uint place = 0;
        for (uint q = 0; q < BLOCK / 4; q++) place += before(keys[block * (BLOCK / 4) + q], q, mine, e % BLOCK);
#if BLOCKS > 1
        if (place < KEPT) {
            const uint c = block * KEPT + place;
            block_keys[c >> 2][c & 3] = mine;
            block_ids[c] = e;
        }
    }
    barrier();
    // A block's first keep the order of their ids among equals, and so do the blocks: the index decides between equals here too.
    for (uint c = tid; c < CANDIDATES; c += WG_SIZE) {
        const uint mine = block_keys[c >> 2][c & 3];
        if (mine == 0) continue;
        uint place = 0;
        for (uint q = 0; q < (CANDIDATES + 3) / 4; q++) place += before(block_keys[q], q, mine, c);
        choose(place, block_ids[c]);
    }
#else
        choose(place, e);
    }
#endif
    barrier();

    const float highest = chosen_logit[0];
#if GATE == 1
    float sum = 0.0;
    for (uint e = tid; e < EXPERTS; e += WG_SIZE) sum += exp(logit[e] - highest);
    sum = wg_sum(sum);
#endif
    for (uint i = tid; i < USED; i += WG_SIZE) {
#if GATE < 2
        float weight = exp(chosen_logit[i] - highest);
#else
        float weight = 1.0 / (1.0 + exp(-chosen_logit[i]));
#endif
#if GATE == 0
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += exp(chosen_logit[j] - highest);
#elif GATE == 3
        float sum = 0.0;
        for (uint j = 0; j < USED; j++) sum += 1.0 / (1.0 + exp(-chosen_logit[j]));
        sum = max(sum, LEAST_SUM);
#endif
#if GATE != 2
        weight /= sum;
#endif
        chosen_weights[token * USED + i] = weight * scale;
        chosen_ids[token * USED + i] = int(chosen_id[i]);
    }
}

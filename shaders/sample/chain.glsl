// The chain of samplers of a request, in the order that it gives. Words of `chain`, F32 [32]; with COLUMNS there is one for each slot:
//   0 samplers (0: SAMPLE's own filters), 1 mu (mirostat's surprise, moved on by each token), 2 typ_p, 3 xtc_probability,
//   4 xtc_threshold, 5 top_n_sigma, 6 dynatemp_range, 7 dynatemp_exponent, 8 tau, 9 eta, 10 temp
//   16..31 the numbers of the samplers in order
// top_k, top_p, min_p and the seed are those of the loop. Rules: vkback/ops/sampling/chain.py.
//
//   float chain_word(uint word)    a word of the column's chain
//   IN_CHAIN(word)                 its index

const uint CHAIN_WORDS = 32u, CHAIN_COUNT = 0u, CHAIN_MU = 1u, CHAIN_TYP_P = 2u, CHAIN_XTC_P = 3u, CHAIN_XTC_T = 4u, CHAIN_SIGMA = 5u;
const uint CHAIN_RANGE = 6u, CHAIN_EXPONENT = 7u, CHAIN_TAU = 8u, CHAIN_ETA = 9u, CHAIN_TEMP = 10u, CHAIN_ORDER = 16u;
const int TOP_K = 1, TOP_P = 2, MIN_P = 3, TYP_P = 4, TOP_N_SIGMA = 5, XTC = 6, TEMPERATURE = 7, MIROSTAT = 8, MIROSTAT_V2 = 9;

#ifdef PICKS
#define CHAIN_BIND LOOP_BIND + 5
#elif defined(COLUMNS)
#define CHAIN_BIND LOOP_BIND + 7
#else
#define CHAIN_BIND LOOP_BIND + 3
#endif
layout(binding = CHAIN_BIND) buffer Chain { float chain_words[]; };
#define IN_CHAIN(word) IN_SLOT(word, CHAIN_WORDS)

float chain_word(uint word) {
    return chain_words[IN_CHAIN(word)];
}

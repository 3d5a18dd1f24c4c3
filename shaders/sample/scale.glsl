// How SAMPLE measures logits: as the distance below the largest one, in steps of 2^-20, clipped to 27 bits (128). Filters compare distances, so
// tokens of equal distance are kept or dropped together. Groups of nine bits number the bins of histograms:
//   level 0: 1/4 wide    level 1: 2^-11    level 2: 2^-20
//
// Bins hold the number of tokens and, for top-p, the sum of exp(-distance). That sum is kept as integers, so that the order of tokens does not
// matter: it adds up what each token loses against the start of its bin, 1 - exp(-offset), in units of DEFICIT_STEP[level].
// Up to 2^18 tokens fit in 32 bits.
//
// Words of `scratch`, of each column: 0 state (0: go on, 1: the token has been made), 1 largest logit (F32), 2 last bin of level 0 to list, 3 tokens listed,
// 4 the sum that top-p keeps if top-k is off (F32), 5.. counts of the level 0 bins, then their losses.

const uint BINS = 512u, LEVELS = 3u, DISTANCE_END = 1u << 27;
const float STEPS_PER_UNIT = 1048576.0;
const float DEFICIT_STEP[LEVELS] = float[](1.0 / 65536.0, 1.0 / 16777216.0, 0.0);
const uint SCRATCH_STATE = 0u, SCRATCH_TOP = 1u, SCRATCH_CUT = 2u, SCRATCH_LISTED = 3u, SCRATCH_TARGET = 4u;
const uint SCRATCH_COUNTS = 5u, SCRATCH_DEFICITS = SCRATCH_COUNTS + BINS;
#define IN_SCRATCH(word) IN_COLUMN(word, SCRATCH_DEFICITS + BINS)

// top-p 0 means: keep only the smallest distance.
const float MIN_SHARE = 1e-9;

// Distances below 128, times 2^20, are exact in a float.
uint distance_of(float logit, float top) {
    return uint(min(top - logit, 127.99999) * STEPS_PER_UNIT);
}

uint bin_of(uint dist, uint level) {
    return dist >> (9u * (2u - level)) & (BINS - 1u);
}

// What a token loses against the start of its bin, in DEFICIT_STEPs.
uint deficit_of(uint dist, uint level) {
    if (level == 2u) return 0u;
    const uint offset = dist & ((1u << (9u * (2u - level))) - 1u);
    return uint((1.0 - exp(-float(offset) / STEPS_PER_UNIT)) / DEFICIT_STEP[level] + 0.5);
}

// The sum of exp(-distance) over a bin that starts at `start`.
float bin_mass(uint count, uint deficit, uint start, uint level) {
    return exp(-float(start) / STEPS_PER_UNIT) * (float(count) - float(deficit) * DEFICIT_STEP[level]);
}

// The largest distance that min-p keeps.
uint distance_limit(float min_p) {
    return uint(clamp(-log(min_p), 0.0, 127.99999) * STEPS_PER_UNIT);
}

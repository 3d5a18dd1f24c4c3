// The walk with scores in registers: the COLS threads that read a row of K also read the row of V. Each thread first has a part of every score
// of the chunk; adding the parts leaves each with the sums of different scores (common/lane_sums.glsl). A thread computes the exponentials of
// its own scores, and the others get them by shuffles. No barrier from the first chunk to the last. Functions as in attention/walk_shared.glsl.
//
// Score v = step * QUERIES + query. Lane l of a row holds scores HELD * n + l % HELD, n = 0, 1 .., which all belong to query l % QUERIES.
// QUERIES is a power of two, at most COLS and at most 16.

#define SCORES (STEPS * QUERIES)
#if SCORES < COLS && SCORES < 16
#define HELD SCORES
#elif COLS < 16
#define HELD COLS
#else
#define HELD 16
#endif
#define SUM_VALUES HELD
#define SUM_LANES COLS
#include "common/lane_sums.glsl"

vec4 own_query[QUERIES][2];
vec4 sum[QUERIES][2];
// For query lane % QUERIES: the rows of this workgroup's that it sees,
// the maximum over the rows of the subgroup's streams, and the sum of the weights that this lane has computed.
uint own_first, own_end;
float top, weight;

// Reductions over those lanes of a row that hold different scores of the same query.
float over_scores_max(float v) { OVER_LANES(v, max, QUERIES, HELD) return v; }
float over_scores_sum(float v) { OVER_LANES(v, OVER_ADD, QUERIES, HELD) return v; }

// v of lane `lane` of this row.
float from_lane(float v, uint lane) { return subgroupShuffle(v, (gl_SubgroupInvocationID & ~(COLS - 1u)) + lane); }

void walk_begin(uint tid) {
    [[unroll]] for (uint i = 0; i < QUERIES; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) {
            own_query[i][j] = query4[i * OUT4 + 2 * (tid % COLS) + j];
            sum[i][j] = vec4(0.0);
        }
    const uint token = tid % QUERIES / HEADS;
    own_first = row_first[0];
    own_end = row_end[0];
    [[unroll]] for (uint t = 1; t < TOKENS; t++)
        if (t == token) {
            own_first = row_first[t];
            own_end = row_end[t];
        }
    own_end = min(own_end, hi);
    top = MASKED;
    weight = 0.0;
#if FUSED
    if (owns_new) {
        const vec4 a = decode_low4(new_k[tid % COLS], K_TYPE), b = decode_high4(new_k[tid % COLS], K_TYPE);
        float part[HELD];
        [[unroll]] for (uint v = 0; v < HELD; v++) part[v] = dot(a, own_query[v % QUERIES][0]) + dot(b, own_query[v % QUERIES][1]);
        const float score = lane_sums(part, tid);
        if (tid < COLS * MERGED) top = score;
        if (tid < COLS) {
            weight = tid % HELD < QUERIES ? 1.0 : 0.0;
            [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                sum[i][0] = decode_low4(new_v[tid], V_TYPE);
                sum[i][1] = decode_high4(new_v[tid], V_TYPE);
            }
        }
    }
#endif
}

void walk(uint kv, uint base, uint tid) {
    float score[SCORES / HELD];
    float part[SCORES / HELD][HELD];
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const vec4 a = decode_low4(k_now[s][0], K_TYPE), b = decode_high4(k_now[s][0], K_TYPE);
        [[unroll]] for (uint i = 0; i < QUERIES; i++)
            part[(s * QUERIES + i) / HELD][(s * QUERIES + i) % HELD] = dot(a, own_query[i][0]) + dot(b, own_query[i][1]);
    }
    if (base + ROWS < hi) load_k(kv, base + ROWS, tid);
    float higher = top;
    [[unroll]] for (uint n = 0; n < SCORES / HELD; n++) {
        const uint step_of = (n * HELD + tid % HELD) / QUERIES;
        const uint row = base + step_of * STREAMS + tid / COLS;
        const float all_lanes = lane_sums(part[n], tid);
        score[n] = row < own_end && row >= own_first ? all_lanes : MASKED;
        higher = max(higher, score[n]);
    }
    higher = over_streams_max(over_scores_max(higher));
    const float shrink = exp2(top - higher);
    top = higher;
    weight *= shrink;
    [[unroll]] for (uint n = 0; n < SCORES / HELD; n++) {
        score[n] = score[n] > MASKED ? exp2(score[n] - top) : 0.0;
        weight += score[n];
    }
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        const float f = from_lane(shrink, i);
        sum[i][0] *= f;
        sum[i][1] *= f;
    }
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const vec4 a = decode_low4(v_now[s], V_TYPE), b = decode_high4(v_now[s], V_TYPE);
        [[unroll]] for (uint i = 0; i < QUERIES; i++) {
            const float e = from_lane(score[(s * QUERIES + i) / HELD], (s * QUERIES + i) % HELD);
            sum[i][0] += e * a;
            sum[i][1] += e * b;
        }
    }
    if (base + ROWS < hi) load_v(kv, base + ROWS, tid);
}

void walk_end(uint tid) {
    const uint bundle = tid / (COLS * MERGED);
    weight = over_streams_sum(over_scores_sum(weight));
    if (tid % (COLS * MERGED) < QUERIES) bundle_weight[bundle * QUERIES + tid % QUERIES] = vec2(top, weight);
    [[unroll]] for (uint i = 0; i < QUERIES; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) sum[i][j] = over_streams_sum(sum[i][j]);
}

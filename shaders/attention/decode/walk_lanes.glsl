// The walk with scores in registers: the COLS threads that read a row of K also read the row of V. Each thread first has a part of every score
// of the chunk; adding the parts leaves each with the sums of different scores (common/lane_sums.glsl). A thread computes the exponentials of
// its own scores, and the others get them by shuffles. No barrier from the first chunk to the last. Functions as in attention/decode/walk_shared.glsl.
//
// Score v = step * QUERIES + query. Lane l of a row holds scores LANE_SCORES * n + l % LANE_SCORES, n = 0, 1 .., which all belong to query l %
// QUERIES. QUERIES is a power of two, at most COLS and at most 16.

#define SCORES (STEPS * QUERIES)
#if SCORES < COLS && SCORES < 16
#define LANE_SCORES SCORES
#elif COLS < 16
#define LANE_SCORES COLS
#else
#define LANE_SCORES 16
#endif
#define SCORE_GROUPS (SCORES / LANE_SCORES)
#define GROUP_STEPS (LANE_SCORES / QUERIES)  // steps of a group of LANE_SCORES scores, of which each lane holds one
#define SUM_VALUES LANE_SCORES
#define SUM_LANES COLS
#include "common/lane_sums.glsl"

vec4 own_query[QUERIES][2];
vec4 sum[QUERIES][2];
// For query lane % QUERIES: the rows of this workgroup's that it sees,
// the maximum over the rows of the subgroup's streams, and the sum of the weights that this lane has computed.
uint own_first, own_end;
float score_max, weight_sum;

// Reductions over those lanes of a row that hold different scores of the same query.
float reduce_scores_max(float v) { LANE_BUTTERFLY(v, max, QUERIES, LANE_SCORES) return v; }
float reduce_scores_sum(float v) { LANE_BUTTERFLY(v, BUTTERFLY_ADD, QUERIES, LANE_SCORES) return v; }

// v of lane `lane` of this row.
float read_lane(float v, uint lane) { return subgroupShuffle(v, (gl_SubgroupInvocationID & ~(COLS - 1u)) + lane); }

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
    score_max = MASKED;
    weight_sum = 0.0;
#if STORES_ROW
    if (owns_new) {
        const vec4 a = decode_low(new_k[tid % COLS], K_TYPE), b = decode_high(new_k[tid % COLS], K_TYPE);
        float part[LANE_SCORES];
        [[unroll]] for (uint v = 0; v < LANE_SCORES; v++) part[v] = dot(a, own_query[v % QUERIES][0]) + dot(b, own_query[v % QUERIES][1]);
        const float score = capped(lane_sums(part, tid));
        if (tid < COLS * SUBGROUP_STREAMS) score_max = score;
        if (tid < COLS) {
            weight_sum = tid % LANE_SCORES < QUERIES ? 1.0 : 0.0;
            [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                sum[i][0] = decode_low(new_v[tid], V_TYPE);
                sum[i][1] = decode_high(new_v[tid], V_TYPE);
            }
        }
    }
#endif
}

// Whether the chunk at `base` has rows for the steps of scores n: the last chunk of a split may have few. Where chunks are short, or one
// token has the device to itself, branches would cost more than they save.
bool group_used(uint base, uint n) {
#if !FUSED && ROWS >= 128
    return n == 0 || base + n * GROUP_STEPS * STREAMS < hi;
#else
    return true;
#endif
}

void walk(uint kv, uint base, uint tid) {
    float score[SCORE_GROUPS];
    float part[SCORE_GROUPS][LANE_SCORES];
    [[unroll]] for (uint n = 0; n < SCORE_GROUPS; n++)
        if (group_used(base, n))
            [[unroll]] for (uint s = n * GROUP_STEPS; s < (n + 1) * GROUP_STEPS; s++) {
                const vec4 a = decode_low(k_now[s][0], K_TYPE), b = decode_high(k_now[s][0], K_TYPE);
                [[unroll]] for (uint i = 0; i < QUERIES; i++)
                    part[n][(s * QUERIES + i) % LANE_SCORES] = dot(a, own_query[i][0]) + dot(b, own_query[i][1]);
            }
    if (base + ROWS < hi) load_k(kv, base + ROWS, tid);
    float new_max = score_max;
    [[unroll]] for (uint n = 0; n < SCORE_GROUPS; n++) {
        score[n] = MASKED;
        if (group_used(base, n)) {
            const uint step_of = (n * LANE_SCORES + tid % LANE_SCORES) / QUERIES;
            const uint row = base + step_of * STREAMS + tid / COLS;
            const float all_lanes = capped(lane_sums(part[n], tid));
            score[n] = row < own_end && row >= own_first ? all_lanes : MASKED;
            new_max = max(new_max, score[n]);
        }
    }
    new_max = reduce_streams_max(reduce_scores_max(new_max));
    const float rescale = exp2(score_max - new_max);
    score_max = new_max;
    weight_sum *= rescale;
    [[unroll]] for (uint n = 0; n < SCORE_GROUPS; n++) {
        score[n] = weight_of(score[n], score_max);
        weight_sum += score[n];
    }
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        const float f = read_lane(rescale, i);
        sum[i][0] *= f;
        sum[i][1] *= f;
    }
    [[unroll]] for (uint n = 0; n < SCORE_GROUPS; n++)
        if (group_used(base, n))
            [[unroll]] for (uint s = n * GROUP_STEPS; s < (n + 1) * GROUP_STEPS; s++) {
                const vec4 a = decode_low(v_now[s], V_TYPE), b = decode_high(v_now[s], V_TYPE);
                [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                    const float e = read_lane(score[n], (s * QUERIES + i) % LANE_SCORES);
                    sum[i][0] += e * a;
                    sum[i][1] += e * b;
                }
            }
    if (base + ROWS < hi) load_v(kv, base + ROWS, tid);
}

void walk_end(uint tid) {
    const uint stream = tid / (COLS * SUBGROUP_STREAMS);
    weight_sum = reduce_streams_sum(reduce_scores_sum(weight_sum));
    if (tid % (COLS * SUBGROUP_STREAMS) < QUERIES) stream_max_sum[stream * QUERIES + tid % QUERIES] = vec2(score_max, weight_sum);
    [[unroll]] for (uint i = 0; i < QUERIES; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) sum[i][j] = reduce_streams_sum(sum[i][j]);
}

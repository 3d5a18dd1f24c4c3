// The walk with scores in shared memory: the threads that read a row of K write its scores, and those that read the row of V read them.
//
//   void walk_begin(tid)          call once query4 holds the queries; processes the new row if this workgroup owns it
//   void walk(kv, base, tid)      processes the chunk at `base`, which is in k_now and v_now, and prefetches the next one
//   void walk_end(tid)            writes stream_max_sum; after it, the first COLS threads of each merged stream hold its `sum`

shared float scores[2][ROWS * QUERIES];  // double buffering: one barrier per chunk is enough
uint half_now = 0;

float score_max[QUERIES], weight_sum[QUERIES];
vec4 sum[QUERIES][2];

// This lane's share of the scores of one row of K.
void score_parts(RAW8 row[K_PARTS], uint tid, out float score[QUERIES]) {
    [[unroll]] for (uint i = 0; i < QUERIES; i++) score[i] = 0.0;
    [[unroll]] for (uint j = 0; j < K_PARTS; j++) {
        const uint part = j * LANES + tid % LANES;
        const vec4 a = decode_low(row[j], K_TYPE), b = decode_high(row[j], K_TYPE);
        [[unroll]] for (uint i = 0; i < QUERIES; i++) score[i] += dot(a, query4[i * HEAD4 + 2 * part]) + dot(b, query4[i * HEAD4 + 2 * part + 1]);
    }
}

void walk_begin(uint tid) {
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        score_max[i] = MASKED;
        weight_sum[i] = 0.0;
        sum[i][0] = sum[i][1] = vec4(0.0);
    }
#if STORES_ROW
    if (owns_new) {
        RAW8 row[K_PARTS];
        float score[QUERIES];
        [[unroll]] for (uint j = 0; j < K_PARTS; j++) row[j] = new_k[j * LANES + tid % LANES];
        score_parts(row, tid, score);
        [[unroll]] for (uint i = 0; i < QUERIES; i++) {
            const float all_lanes = group_sum(score[i], LANES);
            if (tid < COLS) {
                score_max[i] = capped(all_lanes);
                weight_sum[i] = 1.0;
                sum[i][0] = decode_low(new_v[tid], V_TYPE);
                sum[i][1] = decode_high(new_v[tid], V_TYPE);
            }
        }
    }
#endif
}

void make_scores(uint base, uint tid) {
    [[unroll]] for (uint s = 0; s < STEPS; s++) {
        const uint r = s * (WG_SIZE / LANES) + tid / LANES;
        const uint row = base + r;
        float score[QUERIES];
        score_parts(k_now[s], tid, score);
        [[unroll]] for (uint i = 0; i < QUERIES; i++) {
            const float all_lanes = group_sum(score[i], LANES);
            if (tid % LANES == i % LANES)
                scores[half_now][r * QUERIES + i] = row < row_end[i / HEADS] && row >= row_first[i / HEADS] && row < hi ? capped(all_lanes) : MASKED;
        }
    }
}

void walk(uint kv, uint base, uint tid) {
    make_scores(base, tid);
    if (base + ROWS < hi) load_k(kv, base + ROWS, tid);
    barrier();
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
        float new_max = score_max[i];
        [[unroll]] for (uint s = 0; s < V_STEPS; s++) {
            const uint r = s * STREAMS + tid / COLS;
            if (r < ROWS) new_max = max(new_max, scores[half_now][r * QUERIES + i]);
        }
        const float rescale = exp2(score_max[i] - new_max);
        score_max[i] = new_max;
        weight_sum[i] *= rescale;
        sum[i][0] *= rescale;
        sum[i][1] *= rescale;
    }
    [[unroll]] for (uint s = 0; s < V_STEPS; s++) {
        const uint r = s * STREAMS + tid / COLS;
        if (r < ROWS) {
            const vec4 a = decode_low(v_now[s], V_TYPE), b = decode_high(v_now[s], V_TYPE);
            [[unroll]] for (uint i = 0; i < QUERIES; i++) {
                const float score = scores[half_now][r * QUERIES + i];
                const float e = weight_of(score, score_max[i]);
                weight_sum[i] += e;
                sum[i][0] += e * a;
                sum[i][1] += e * b;
            }
        }
    }
    if (base + ROWS < hi) load_v(kv, base + ROWS, tid);
    half_now ^= 1;
}

void walk_end(uint tid) {
    const uint stream = tid / (COLS * SUBGROUP_STREAMS);
    [[unroll]] for (uint i = 0; i < QUERIES; i++) {
#if SUBGROUP_STREAMS > 1
        const float new_max = reduce_streams_max(score_max[i]);
        const float rescale = exp2(score_max[i] - new_max);
        score_max[i] = new_max;
        weight_sum[i] = reduce_streams_sum(weight_sum[i] * rescale);
        [[unroll]] for (uint j = 0; j < 2; j++) sum[i][j] = reduce_streams_sum(sum[i][j] * rescale);
#endif
        if (tid % (COLS * SUBGROUP_STREAMS) == 0 && stream < MERGED_STREAMS)
            stream_max_sum[stream * QUERIES + i] = vec2(score_max[i], weight_sum[i]);
    }
}

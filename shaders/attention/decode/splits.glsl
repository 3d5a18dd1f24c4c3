// Split KV: several workgroups each take a split of a tile's rows, and one workgroup combines their partial results in the order of the splits.
//
// With barriers between stages the combiner is the last workgroup to arrive (common/ticket.glsl). In barrier-free stages it is the workgroup
// with the last split, which spin-waits on the partial results of the others: workgroups start in order, so all of them have started.
//
//   void store_partial(tile, split, used, i, o, total, max_sum)  stores vec4 o of this workgroup's sums,
//                                                                which belongs to query i, and that query's (maximum, sum of weights)
//   bool is_combiner(tile, split, used)                          whether this workgroup combines; every thread calls
//   void combine(tid, tile, used, head0)                         leaves the result in query4; every thread of the combiner calls
//
// READERS threads share the splits of each vec4, so that a thread spins on few words.

#define SPLIT4 (QUERIES * OUT4 + (QUERIES + 1) / 2)   // vec4 per split
#define READER_SPLITS ((SPLITS + READERS - 1) / READERS)
#define SPLITS_AT_ONCE (READER_SPLITS < 16 ? READER_SPLITS : 16)

#if !SPINS
#include "common/ticket.glsl"
#endif

shared vec2 own_max_sum[QUERIES];  // barrier-free: the combiner keeps its own (the last) split here, and its sums in query4

void store_partial(uint tile, uint split, uint used, uint i, uint o, vec4 total, vec2 max_sum) {
#if SPINS
    if (split == used - 1u) {
        query4[o] = total;
        if (o % OUT4 == 0) own_max_sum[i] = max_sum;
        return;
    }
#endif
    const uint at = (tile * SPLITS + split) * SPLIT4;
    partial4[at + o] = not_sentinel(total);
    if (o % OUT4 == 0) partial2[(at + QUERIES * OUT4) * 2 + i] = vec2(not_sentinel(max_sum.x), not_sentinel(max_sum.y));
}

bool is_combiner(uint tile, uint split, uint used) {
#if SPINS
    barrier();
    return split == used - 1u;
#else
    return last_to_arrive(tile, used);
#endif
}

vec4 split_sum[SPLITS_AT_ONCE];
vec2 split_max_sum[SPLITS_AT_ONCE];

// Reads splits `first`, `first` + READERS ..; in place of those past `last`, `last` again.
void read_splits(uint tile, uint first, uint last, uint i, uint o) {
    [[unroll]] for (uint s = 0; s < SPLITS_AT_ONCE; s++) {
        const uint at = (tile * SPLITS + min(first + s * READERS, last)) * SPLIT4;
        split_max_sum[s] = partial2[(at + QUERIES * OUT4) * 2 + i];
        split_sum[s] = partial4[at + o];
    }
}

#if SPINS
bool splits_arrived() {
    bool valid = true;
    [[unroll]] for (uint s = 0; s < SPLITS_AT_ONCE; s++) valid = valid && arrived(split_max_sum[s]) && arrived(split_sum[s]);
    return valid;
}
#endif

// Combines vec4 o of splits reader, reader + READERS ..; max_sum: their (maximum, sum of weights).
vec4 combine_splits(uint tile, uint used, uint reader, uint i, uint o, out vec2 max_sum) {
    max_sum = vec2(MASKED, 0.0);
    vec4 total = vec4(0.0);
    for (uint first = reader; first < used; first += SPLITS_AT_ONCE * READERS) {
        SPIN_UNTIL(read_splits(tile, first, used - 1u - SPINS, i, o), splits_arrived())
#if SPINS
        [[unroll]] for (uint s = 0; s < SPLITS_AT_ONCE; s++)
            if (first + s * READERS == used - 1u) {
                split_max_sum[s] = own_max_sum[i];
                split_sum[s] = query4[o];
            }
#endif
        float new_max = max_sum.x;
        [[unroll]] for (uint s = 0; s < SPLITS_AT_ONCE; s++) new_max = max(new_max, split_max_sum[s].x);
        const float rescale = exp2(max_sum.x - new_max);
        max_sum = vec2(new_max, max_sum.y * rescale);
        total *= rescale;
        [[unroll]] for (uint s = 0; s < SPLITS_AT_ONCE; s++) {
            const float e = first + s * READERS < used ? exp2(split_max_sum[s].x - new_max) : 0.0;
            max_sum.y += e * split_max_sum[s].y;
            total += e * split_sum[s];
        }
    }
    return total;
}

#if READERS > 1
// The readers merge their results in the shared memory of the row streams, which is free by now.
void combine(uint tid, uint tile, uint used, uint head0) {
    const uint reader = tid / (QUERIES * OUT4), o = tid % (QUERIES * OUT4), i = o / OUT4;
    vec2 max_sum;
    if (reader < READERS) {
        stream_sum[tid] = combine_splits(tile, used, reader, i, o, max_sum);
        if (o % OUT4 == 0) stream_max_sum[reader * QUERIES + i] = max_sum;
    }
    barrier();
    if (reader > 0) return;
    const vec4 total = merge_partials(READERS, QUERIES * OUT4, i, o, max_sum);
    query4[o] = normalize_sum(total, max_sum, head0 + i % HEADS);
}
#else
void combine(uint tid, uint tile, uint used, uint head0) {
    for (uint o = tid; o < QUERIES * OUT4; o += WG_SIZE) {
        const uint i = o / OUT4;
        vec2 max_sum;
        const vec4 total = combine_splits(tile, used, 0u, i, o, max_sum);
        query4[o] = normalize_sum(total, max_sum, head0 + i % HEADS);
    }
}
#endif

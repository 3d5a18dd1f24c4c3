// The shares that workgroups take of a tile's rows, and the one workgroup that adds them up in their order.
//
// With barriers between stages it is the last to arrive (common/ticket.glsl). Where stages hand over word by word it is the one with the last
// share, which reads the others' results until they are there: workgroups start in order, so it waits for none that has not started.
//
//   void put_share(tile, share, used, i, o, total, weight)  leaves what this workgroup has found: vec4 o of the tile's sums, of query i,
//                                                           and that query's (maximum, sum of weights)
//   bool adds_up(tile, share, used)                         whether this workgroup adds up; every thread calls
//   void add_up(tid, tile, used, head0)                     leaves in query4 what attention gives; every thread of that workgroup calls
//
// READERS threads divide the shares of a vec4 among them, so that a thread waits for few.

#define SHARE4 (QUERIES * OUT4 + (QUERIES + 1) / 2)   // vec4 of a share
#define READS ((SPLITS + READERS - 1) / READERS)
#define AT_ONCE (READS < 16 ? READS : 16)

#if !AWAITS
#include "common/ticket.glsl"
#endif

shared vec2 own_weight[QUERIES];  // where words are handed over a workgroup keeps the last share to itself, its sums in query4

void put_share(uint tile, uint share, uint used, uint i, uint o, vec4 total, vec2 weight) {
#if AWAITS
    if (share == used - 1u) {
        query4[o] = total;
        if (o % OUT4 == 0) own_weight[i] = weight;
        return;
    }
#endif
    const uint at = (tile * SPLITS + share) * SHARE4;
    partial4[at + o] = never_empty(total);
    if (o % OUT4 == 0) partial2[(at + QUERIES * OUT4) * 2 + i] = vec2(never_empty(weight.x), never_empty(weight.y));
}

bool adds_up(uint tile, uint share, uint used) {
#if AWAITS
    barrier();
    return share == used - 1u;
#else
    return last_to_arrive(tile, used);
#endif
}

vec4 share_sum[AT_ONCE];
vec2 share_weight[AT_ONCE];

// Shares `first`, `first` + READERS ..; past `last` that one again.
void read_shares(uint tile, uint first, uint last, uint i, uint o) {
    [[unroll]] for (uint s = 0; s < AT_ONCE; s++) {
        const uint at = (tile * SPLITS + min(first + s * READERS, last)) * SHARE4;
        share_weight[s] = partial2[(at + QUERIES * OUT4) * 2 + i];
        share_sum[s] = partial4[at + o];
    }
}

#if AWAITS
bool shares_there() {
    bool there = true;
    [[unroll]] for (uint s = 0; s < AT_ONCE; s++) there = there && filled(share_weight[s]) && filled(share_sum[s]);
    return there;
}
#endif

// vec4 o of shares reader, reader + READERS .., and their (maximum, sum of weights).
vec4 added_up(uint tile, uint used, uint reader, uint i, uint o, out vec2 weight) {
    weight = vec2(MASKED, 0.0);
    vec4 total = vec4(0.0);
    for (uint first = reader; first < used; first += AT_ONCE * READERS) {
        AWAIT(read_shares(tile, first, used - 1u - AWAITS, i, o), shares_there())
#if AWAITS
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++)
            if (first + s * READERS == used - 1u) {
                share_weight[s] = own_weight[i];
                share_sum[s] = query4[o];
            }
#endif
        float higher = weight.x;
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++) higher = max(higher, share_weight[s].x);
        const float shrink = exp2(weight.x - higher);
        weight = vec2(higher, weight.y * shrink);
        total *= shrink;
        [[unroll]] for (uint s = 0; s < AT_ONCE; s++) {
            const float e = first + s * READERS < used ? exp2(share_weight[s].x - higher) : 0.0;
            weight.y += e * share_weight[s].y;
            total += e * share_sum[s];
        }
    }
    return total;
}

#if READERS > 1
// What the readers have found goes through the memory of the bundles, which nobody needs any more.
void add_up(uint tid, uint tile, uint used, uint head0) {
    const uint reader = tid / (QUERIES * OUT4), o = tid % (QUERIES * OUT4), i = o / OUT4;
    vec2 weight;
    if (reader < READERS) {
        bundle_sum[tid] = added_up(tile, used, reader, i, o, weight);
        if (o % OUT4 == 0) bundle_weight[reader * QUERIES + i] = weight;
    }
    barrier();
    if (reader > 0) return;
    const vec4 total = met(READERS, QUERIES * OUT4, i, o, weight);
    query4[o] = finished(total, weight, head0 + i % HEADS);
}
#else
void add_up(uint tid, uint tile, uint used, uint head0) {
    for (uint o = tid; o < QUERIES * OUT4; o += WG_SIZE) {
        const uint i = o / OUT4;
        vec2 weight;
        const vec4 total = added_up(tile, used, 0u, i, o, weight);
        query4[o] = finished(total, weight, head0 + i % HEADS);
    }
}
#endif

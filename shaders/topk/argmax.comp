#version 450
// ARGMAX of rows of logits: the index of the largest, of equals the lowest index; -1 if a logit is NaN. What happens with it:
//   MODE 0  it is stored (ARGMAX)
//   MODE 1  it is the next token, and the generation loop advances (SAMPLE, greedy); with COLUMNS the row is a column with a loop of its own
//   MODE 2  the largest logit becomes the reference of SAMPLE's distances; at temperature 0 the token is made right here
// With COLUMNS or DRAFTS (MODE 2 alone) rows are columns, see sample/column.glsl.
//
// Bindings:
//   0  logits   F32 [n, vocab]
//   1  partial  scratch: uvec2 (key, index) per row and workgroup
//   2  tickets  one counter per row (common/ticket.glsl)
//   3  ids      MODE 0: I32 [n]
//   LOOP_BIND ..  loop, tokens, pos, of columns and with IDS more: MODE 1 and 2 (sample/loop.glsl)
//   LOOP_BIND + 3, with COLUMNS + 7, with PICKS + 5  scratch: MODE 2 (sample/scale.glsl)
//
// Workgroup (x, y) takes logits x * WG_SIZE * PER_THREAD .. of row y; neighbouring threads read neighbouring logits. The last workgroup of a
// row to arrive takes the largest of the partial results.
//
// Defines: MODE PER_THREAD, LOOP_BIND if MODE > 0, COLUMNS (and with it PICKS, MODE 2 alone) or DRAFTS 1 or nothing,
// IDS (MODE 1 alone) 1 or nothing, those of common/reduce.glsl

#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab;
    uint capacity;      // ids that the loop's ring buffer holds
#ifdef COLUMNS
    uint n_slots, page, max_pages;
#endif
} p;

layout(binding = 0) readonly buffer Logits { float logits[]; };
layout(binding = 1) coherent buffer Partial { uvec2 partial[]; };
layout(binding = 2) coherent buffer Tickets { uint tickets[]; };
#if MODE == 0
layout(binding = 3) writeonly buffer Ids { int ids[]; };
#else
#include "sample/loop.glsl"
#endif
#if MODE == 2
#include "sample/scale.glsl"
#ifdef PICKS
#define SCRATCH_BIND LOOP_BIND + 5
#elif defined(COLUMNS)
#define SCRATCH_BIND LOOP_BIND + 7
#else
#define SCRATCH_BIND LOOP_BIND + 3
#endif
layout(binding = SCRATCH_BIND) writeonly buffer Scratch { uint scratch[]; };
#endif

#include "common/ticket.glsl"
#include "topk/best.glsl"

void main() {
    const uint tid = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.y;
    const uint groups = gl_NumWorkGroups.x;
#ifdef MANY_COLUMNS
    const uint fate = column_fate();
    if (fate != DRAWS) {
#if MODE == 2
        if (gl_WorkGroupID.x == 0 && tid == 0) scratch[IN_SCRATCH(SCRATCH_STATE)] = 1;
#endif
#ifdef COLUMNS
        // Every workgroup of the column has seen what becomes of it before the last one changes that.
        if (fate == ENDS && (groups == 1 || last_to_arrive(row, groups)) && tid == 0) column_end();
#endif
        return;
    }
#endif
    const uint from = gl_WorkGroupID.x * (WG_SIZE * PER_THREAD) + tid;
    float mine[PER_THREAD];
    [[unroll]] for (uint i = 0; i < PER_THREAD; i++) mine[i] = logits[row * p.vocab + min(from + i * WG_SIZE, p.vocab - 1)];
#if MODE > 0 && !defined(MANY_COLUMNS)
    if (loop_stopped()) return;
#endif
    uvec2 best = NO_CANDIDATE;
    [[unroll]] for (uint i = 0; i < PER_THREAD; i++) {
        const uint id = from + i * WG_SIZE;
        if (id < p.vocab) best = max_candidate(best, candidate(mine[i], id));
    }
    best = wg_max_candidate(best);
    if (groups > 1) {
        if (tid == 0) partial[row * groups + gl_WorkGroupID.x] = best;
        if (!last_to_arrive(row, groups)) return;
        best = NO_CANDIDATE;
        for (uint i = tid; i < groups; i += WG_SIZE) best = max_candidate(best, partial[row * groups + i]);
        best = wg_max_candidate(best);
    }
    const int id = best.x == NAN_KEY ? -1 : int(best.y);
#if MODE == 0
    if (tid == 0) ids[row] = id;
#elif MODE == 1
    if (tid == 0) loop_advance(id);
#else
    const float top = id < 0 ? 0.0 : logits[IN_COLUMN(id, p.vocab)];
    const bool done = id < 0 || isinf(top) || intBitsToFloat(loop_words[IN_LOOP(LOOP_TEMP)]) <= 0.0;
    for (uint i = tid; i < 2 * BINS; i += WG_SIZE) scratch[IN_SCRATCH(SCRATCH_COUNTS + i)] = 0;
    if (tid == 0) {
        scratch[IN_SCRATCH(SCRATCH_STATE)] = done ? 1 : 0;
        scratch[IN_SCRATCH(SCRATCH_TOP)] = floatBitsToUint(top);
        scratch[IN_SCRATCH(SCRATCH_LISTED)] = 0;
        if (done) loop_advance(id);
    }
#endif
}

#version 450
// PENALTIES: prepares logits for SAMPLE. Adds a bias per token, then penalizes tokens among the last `last_n` of the text;
// with MASKED, only tokens whose bit is set remain. With COLUMNS: PENALTIES_COLUMNS, of n columns, each with the bias, text, loop and mask of
// its sequence's slot; logits of a column that picks nothing pass through. With DRAFTS: PENALTIES_DRAFTS, of n columns of one text, of which
// column t follows the tokens of columns 0..t; nothing is counted in `seen`, which sample/accept.comp does. With both:
// PENALTIES_DRAFTS_COLUMNS, of sequences with drafts.
//
// Bindings:
//   0  logits  F32 [vocab]
//   1  bias    F32 [vocab]
//   2  seen    I32 [4 + vocab + n_ctx]: repetition, presence and frequency penalty F32, last_n; for each token, how often it is among the last
//              last_n before this step; the tokens by position. The step counts its own token in and the one that leaves the window out
//   3  loop    I32; word 1 is not 0 once the loop has stopped: then nothing is counted
//   4  tokens  I32 [1]: token of this step
//   5  pos     I32 [1]: its position
//   6  y       F32 [vocab]
//   7  mask    I32 [ceil(vocab / 32)] (MASKED; of columns the last binding): bit id % 32 of word id / 32; a token without its bit gets -inf
//   with COLUMNS
//   7  slots   I32 [n]: bias, seen, loop and mask are those of one slot after those of another; logits and y of one column after another's
//   8  draws   I32 [n]: 0: the column picks nothing; with DRAFTS 1: the last token of its sequence, 1 + i: its draft i
//   with DRAFTS logits, tokens, pos, y and mask are those of one column after another's; a column with pos -1 passes through
//
// One thread per token of the vocabulary, of each column along y; only that thread touches the token's count.
//
// Defines: WG_SIZE, and MASKED, COLUMNS and DRAFTS 1 or nothing; with the last two MAX_COLUMNS
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab;
    uint n_ctx;
#ifdef COLUMNS
    uint n_slots, loop_words;
#endif
} p;

layout(std430, binding = 0) readonly buffer Logits { float logits[]; };
layout(std430, binding = 1) readonly buffer Bias { float bias[]; };
layout(std430, binding = 2) buffer Seen { int seen[]; };
layout(std430, binding = 3) readonly buffer Loop { int loop_words[]; };
layout(std430, binding = 4) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 5) readonly buffer Pos { int pos[]; };
layout(std430, binding = 6) writeonly buffer OutY { float y[]; };
#ifdef COLUMNS
layout(std430, binding = 7) readonly buffer Slots { int slots[]; };
layout(std430, binding = 8) readonly buffer Draws { int draws[]; };
#define MASK_BIND 9
#else
#define MASK_BIND 7
#endif
#ifdef MASKED
layout(std430, binding = MASK_BIND) readonly buffer Mask { uint mask[]; };
#endif

#include "sample/column.glsl"

const uint COUNTS = 4u;
#ifdef DRAFTS
#define IN_MASK(i, size) IN_COLUMN(i, size)
#else
#define IN_MASK(i, size) IN_SLOT(i, size)
#endif
#define IN_SEEN(i) IN_SLOT(i, COUNTS + p.vocab + p.n_ctx)

#ifdef DRAFTS
#include "sample/taken.glsl"
#endif

void main() {
    const uint id = gl_GlobalInvocationID.x;
#ifdef DRAFTS
    gather_taken();
#endif
#ifdef COLUMNS
    if (id >= p.vocab) return;
    const bool draws_now = pos[COLUMN] >= 0 && draws[COLUMN] != 0 && uint(slots[COLUMN]) < p.n_slots;
    if (!draws_now || loop_words[IN_SLOT(1u, p.loop_words)] != 0) {
        y[IN_COLUMN(id, p.vocab)] = logits[IN_COLUMN(id, p.vocab)];
        return;
    }
#else
#ifdef DRAFTS
    if (id >= p.vocab) return;
    if (pos[COLUMN] < 0 || loop_words[1] != 0) {
        y[IN_COLUMN(id, p.vocab)] = logits[IN_COLUMN(id, p.vocab)];
        return;
    }
#else
    if (id >= p.vocab || loop_words[1] != 0) return;
#endif
#endif
    const uint places = COUNTS + p.vocab;
    const int last_n = seen[IN_SEEN(3)];
    int count = seen[IN_SEEN(COUNTS + id)];
#ifdef DRAFTS
    // The tokens of the columns so far come in, and as many leave the window, some of which are in columns themselves.
    const int last = last_taken(), first = pos[COLUMN] - last;
    for (int i = 0; i <= last; i++) {
        const int gone = first + i - last_n, begun = i - last_n;
        if (int(id) == taken(i)) count++;
        if (gone >= 0 && gone < int(p.n_ctx) && int(id) == (begun >= 0 ? taken(begun) : seen[IN_SEEN(places + uint(gone))])) count--;
    }
#else
    const int token = tokens[COLUMN], at = pos[COLUMN], leaves = at - last_n;
    // If last_n is 0, this step's token is itself the one that leaves;
    // its place is written below, perhaps by another thread, so it must not be read here.
    if (int(id) == token) count++;
    if (leaves >= 0 && leaves < int(p.n_ctx) && int(id) == (last_n == 0 ? token : seen[IN_SEEN(places + uint(leaves))])) count--;
    seen[IN_SEEN(COUNTS + id)] = count;
    if (int(id) == token && at < int(p.n_ctx)) seen[IN_SEEN(places + uint(at))] = token;
#endif

    float x = logits[IN_COLUMN(id, p.vocab)] + bias[IN_SLOT(id, p.vocab)];
    if (count > 0) {
        const float repeat = intBitsToFloat(seen[IN_SEEN(0)]);
        x = x > 0.0 ? x / repeat : x * repeat;
        x -= intBitsToFloat(seen[IN_SEEN(1)]) + intBitsToFloat(seen[IN_SEEN(2)]) * float(count);
    }
#ifdef MASKED
    if ((mask[IN_MASK(id >> 5, (p.vocab + 31u) / 32u)] >> (id & 31u) & 1u) == 0u) x = uintBitsToFloat(0xff800000u);
#endif
    y[IN_COLUMN(id, p.vocab)] = x;
}

#version 450
// DRY: tokens that would lengthen a repetition of the text's end lose of their logits, the more the longer it is. With COLUMNS: DRY_COLUMNS,
// of n columns, each with the text, loop and settings of its sequence's slot. With DRAFTS: DRY_DRAFTS, of n columns of one text, of which
// column t follows the tokens of columns 0..t, which `seen` does not have yet; with both DRY_DRAFTS_COLUMNS.
//
// Bindings:
//   0  y       F32 [vocab]: logits, changed in place
//   1  seen    I32, see sample/penalties.comp, which has noted this step's token: the tokens by position
//   2  loop    I32; word 1 is not 0 once the loop has stopped
//   3  pos     I32 [1]: position of the last token of the text
//   4  dry     I32 [256 + 2 * vocab]: 0 multiplier F32 (0: nothing happens), 1 base F32, 2 allowed length, 3 tokens that count, the last ones;
//              8.. 31 tails of 8 words: how many tokens must follow a head, and which; 256.. for each token what it breaks a repetition as:
//              bit 0 alone, bit 1 + i as the head of tail i; then for each token the longest repetition that it would lengthen, 0 between runs
//   with COLUMNS
//   5  slots, 6  draws   I32 [n], as of sample/penalties.comp; seen, loop and dry are those of one slot after those of another
//
//   with DRAFTS, behind those
//   5 or 7  tokens   I32 [n], see sample/taken.glsl
//   6 or 8  longest  I32 [n, vocab]: of each column the last part of `dry`, which is not used then
//
// One workgroup a column. Threads take places of the text; neighbouring threads read neighbouring ones.
//
// Defines: WG_SIZE, COLUMNS and DRAFTS 1 or nothing; with both MAX_COLUMNS
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint vocab, n_ctx;
#ifdef COLUMNS
    uint n_slots, loop_words;
#endif
} p;

layout(binding = 0) buffer Y { float y[]; };
layout(binding = 1) readonly buffer Seen { int seen[]; };
layout(binding = 2) readonly buffer Loop { int loop_words[]; };
layout(binding = 3) readonly buffer Pos { int pos[]; };
layout(binding = 4) coherent buffer Dry { int dry[]; };
#ifdef COLUMNS
layout(binding = 5) readonly buffer Slots { int slots[]; };
layout(binding = 6) readonly buffer Draws { int draws[]; };
#define TOKENS_BIND 7
#else
#define TOKENS_BIND 5
#endif
#ifdef DRAFTS
layout(binding = TOKENS_BIND) readonly buffer Tokens { int tokens[]; };
layout(binding = TOKENS_BIND + 1) coherent buffer Longest { int longest[]; };
#endif

#include "sample/column.glsl"

const uint MULTIPLIER = 0u, BASE = 1u, ALLOWED = 2u, LAST_N = 3u, TAILS = 8u, TAIL_WORDS = 8u, N_TAILS = 31u, BREAKERS = 256u;
const uint LONGEST = 64u;    // tokens of a repetition that are compared

#define IN_SEEN(i) IN_SLOT(i, 4u + p.vocab + p.n_ctx)
#define IN_DRY(i) IN_SLOT(i, BREAKERS + 2u * p.vocab)
#ifdef DRAFTS
#include "sample/taken.glsl"
#define LONGEST_OF(token) longest[IN_COLUMN(token, p.vocab)]
#else
#define LONGEST_OF(token) dry[IN_DRY(BREAKERS + p.vocab + token)]
#endif

shared uint broken;

int token_at(uint place) {
#ifdef DRAFTS
    const int drafted = int(place) - (pos[COLUMN] - last_taken());
    if (drafted >= 0) return taken(drafted);
#endif
    return seen[IN_SEEN(4u + p.vocab + place)];
}

// Tokens of the longest sequence that begins at a place and breaks a repetition; 0: none does.
uint breaks_at(uint place, uint length) {
    const uint as = uint(dry[IN_DRY(BREAKERS + uint(token_at(place)))]);
    uint longest = as & 1u;
    for (uint i = 0u; i < N_TAILS && as > 1u; i++) {
        if ((as >> (i + 1u) & 1u) == 0u) continue;
        const uint tail = TAILS + TAIL_WORDS * i, tokens = uint(dry[IN_DRY(tail)]);
        bool same = place + tokens < length;
        for (uint j = 1u; j <= tokens && same; j++) same = token_at(place + j) == dry[IN_DRY(tail + j)];
        if (same) longest = max(longest, tokens + 1u);
    }
    return longest;
}

void main() {
    const uint tid = gl_LocalInvocationID.x;
#ifdef DRAFTS
    gather_taken();
#endif
#ifdef COLUMNS
    if (pos[COLUMN] < 0 || draws[COLUMN] == 0 || uint(slots[COLUMN]) >= p.n_slots || loop_words[IN_SLOT(1u, p.loop_words)] != 0) return;
#else
    if (pos[COLUMN] < 0 || loop_words[1] != 0) return;
#endif
    const float multiplier = intBitsToFloat(dry[IN_DRY(MULTIPLIER)]);
    const uint length = min(uint(pos[COLUMN]) + 1u, p.n_ctx), last_n = uint(dry[IN_DRY(LAST_N)]), allowed = uint(dry[IN_DRY(ALLOWED)]);
    if (multiplier == 0.0 || min(last_n, length) <= allowed) return;
    const uint first = length - min(last_n, length);

    // A repetition reaches back to what broke it last, at most.
    if (tid == 0u) broken = 0u;
    barrier();
    for (uint place = first + tid; place < length; place += WG_SIZE) {
        const uint tokens = breaks_at(place, length);
        if (tokens > 0u) atomicMax(broken, (place + 1u) << 4u | tokens);
    }
    barrier();
    const uint reach = broken == 0u ? length - first : length - ((broken >> 4u) - 1u + (broken & 15u));
    const uint most = min(reach, LONGEST);
    if (most < allowed) return;

    for (uint place = first + tid; place + 1u < length; place += WG_SIZE) {
        uint same = 0u;
        while (same < most && place >= first + same && token_at(place - same) == token_at(length - 1u - same)) same++;
        if (same >= allowed) atomicMax(LONGEST_OF(uint(token_at(place + 1u))), int(same));
    }
    memoryBarrierBuffer();
    barrier();
    for (uint place = first + tid; place + 1u < length; place += WG_SIZE) {
        const uint token = uint(token_at(place + 1u));
        const int same = atomicExchange(LONGEST_OF(token), 0);
        if (same <= 0 || (dry[IN_DRY(BREAKERS + token)] & 1) != 0) continue;
        const float grown = min(float(uint(same) - allowed) * log(intBitsToFloat(dry[IN_DRY(BASE)])), 80.0);
        y[IN_COLUMN(token, p.vocab)] -= multiplier * exp(grown);
    }
}

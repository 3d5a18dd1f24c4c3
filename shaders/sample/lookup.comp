#version 450
// LOOKUP: drafts of the next tokens, found in the text itself: what followed the longest earlier copy of the text's end.
//
// Bindings:
//   0  text    I32 [before + n_ctx]: the token of position q at before + q. What lies before is earlier texts, each with -1 behind it, or
//              with KNOWN the draft of position q at q (-1: none), with MODEL that of column c at c - 1
//   1  draft   I32, see vkback/ops/sampling/lookup.py: read FIRST, MODE, MOST, LEAST, MATCH; MADE is moved on
//   2  loop    I32 [32 + capacity], see sample/loop.glsl
//   3  tokens  I32 [n]: column 0 is the text's last token; the others are written
//   4  pos     I32 [n]: position of each column; -1 of those without a draft, and of all once the loop has stopped
//
// One workgroup. Tokens that the loop made since the last run are taken from its ring first. Then thread i compares the end of the text with
// what ends at words L - 2 - i, L - 2 - i - WG_SIZE ..., where L is the end; neighbouring threads read neighbouring words. The longest match
// counts, at most LONGEST tokens of it, and of equal ones the latest. A match that overlaps the end goes on with its own copy.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint before, capacity, n;
} p;

layout(binding = 0) coherent buffer Text { int text[]; };
layout(binding = 1) buffer Draft { int draft[]; };
layout(binding = 2) readonly buffer Loop { int loop_words[]; };
layout(binding = 3) buffer Tokens { int tokens[]; };
layout(binding = 4) buffer Pos { int pos[]; };

const uint FIRST = 0u, MADE = 1u, MODE = 2u, MOST = 3u, LEAST = 4u, MATCH = 5u;
const int KNOWN = 1, MODEL = 2;
const uint RING = 32u;
const uint LONGEST = 32u, PLACE_BITS = 26u;

shared uint best;
shared uint found;

void main() {
    const uint tid = gl_LocalInvocationID.x;
    const int step = loop_words[0], status = loop_words[1], limit = loop_words[2], at = pos[0], made = draft[MADE];
    if (status != 0 || at < 0) {
        for (uint c = tid; c < p.n; c += WG_SIZE) pos[c] = -1;
        return;
    }
    for (int s = made + int(tid); s < step; s += WG_SIZE) text[p.before + uint(at - step + 1 + s)] = loop_words[RING + uint(s) % p.capacity];
    if (tid == 0) best = 0u;
    memoryBarrierBuffer();
    barrier();
    if (tid == 0) draft[MADE] = step;

    const uint end = p.before + uint(at) + 1u, first = uint(draft[FIRST]);
    int room = min(int(p.n) - 1, draft[MOST]);
    if (limit > 0) room = min(room, limit - step - 1);
    const bool known = draft[MODE] == KNOWN || draft[MODE] == MODEL;
    const uint drafts = draft[MODE] == MODEL ? 0u : uint(at) + 1u; // where those of `known` begin
    if (!known && room > 0) {
        const int last = text[end - 1u];
        const uint most = min(LONGEST, uint(at) + 1u);
        uint mine = 0u;
        for (int i = int(end) - 2 - int(tid); i >= int(first); i -= WG_SIZE) {
            if (text[i] != last) continue;
            const uint reach = min(most, uint(i) - first + 1u);
            uint length = 1u;
            while (length < reach && text[uint(i) - length] == text[end - 1u - length]) length++;
            if (int(length) >= draft[MATCH]) mine = max(mine, length << PLACE_BITS | uint(i));
        }
        if (mine != 0u) atomicMax(best, mine);
    }
    if (tid == 0) found = uint(max(room, 0));
    barrier();
    const uint place = best & ((1u << PLACE_BITS) - 1u), period = end - 1u - place;
    const bool any = known || best != 0u;
    for (uint c = 1u + tid; c < p.n; c += WG_SIZE) {
        int token = -1;
        if (known) {
            if (drafts + c - 1u < p.before) token = text[drafts + c - 1u];
        } else if (any) {
            token = text[place + 1u + (c - 1u) % period];
        }
        if (token < 0) atomicMin(found, c - 1u);
        tokens[c] = max(token, 0);
    }
    barrier();
    const int count = int(found) < draft[LEAST] ? 0 : int(found);
    for (uint c = 1u + tid; c < p.n; c += WG_SIZE) pos[c] = int(c) <= count ? at + int(c) : -1;
}

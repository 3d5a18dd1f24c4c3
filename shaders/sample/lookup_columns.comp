#version 450
// LOOKUP_COLUMNS: drafts of the next tokens of several sequences, each found in the sequence's own text: what followed the longest earlier
// copy of its end. As sample/lookup.comp for one text.
//
// Bindings:
//   0  texts   I32 [n_slots, words]: the token of position q at q; with KNOWN the draft of position q (-1: none)
//   1  draft   I32 [n_slots, 96], see vkback/ops/sampling/lookup.py: read MODE, MOST, LEAST, MATCH; MADE is moved on
//   2  loops   I32 [n_slots, 32 + capacity], see sample/loop.glsl
//   3  tokens  I32 [n], 4 pos, 5 rows: of columns of drafts they are written; pos and rows -1 where there is no draft
//   6  slots   I32 [n]: whose column it is
//   7  draws   I32 [n]: 1: the sequence's last token; 1 + i: its draft i
//   8  pages   I32 [n_slots, max_pages]
//
// A workgroup for each column, of which those of last tokens work. Tokens that the loop made since the last run are taken from its ring
// first. Then thread i compares the end of the text with what ends at words L - 2 - i, L - 2 - i - WG_SIZE ..., where L is the end;
// neighbouring threads read neighbouring words. The longest match counts, of equal ones the latest.
//
// Defines: WG_SIZE
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint words, capacity, n, n_slots, page, max_pages;
} p;

layout(binding = 0) coherent buffer Texts { int texts[]; };
layout(binding = 1) buffer Draft { int draft[]; };
layout(binding = 2) readonly buffer Loop { int loop_words[]; };
layout(binding = 3) writeonly buffer Tokens { int tokens[]; };
layout(binding = 4) buffer Pos { int pos[]; };
layout(binding = 5) writeonly buffer Rows { int rows[]; };
layout(binding = 6) readonly buffer Slots { int slots[]; };
layout(binding = 7) readonly buffer Draws { int draws[]; };
layout(binding = 8) readonly buffer Pages { int pages[]; };

const uint DRAFT_WORDS = 96u, MADE = 1u, MODE = 2u, MOST = 3u, LEAST = 4u, MATCH = 5u;
const int KNOWN = 1;
const uint RING = 32u;
const uint LONGEST = 32u, PLACE_BITS = 26u;

shared uint best;
shared uint found;

// The page of a row of the sequence, -1: none.
int page_of(uint slot, uint row) {
    return row / p.page < p.max_pages ? pages[slot * p.max_pages + row / p.page] : -1;
}

void main() {
    const uint tid = gl_LocalInvocationID.x, column = gl_WorkGroupID.x;
    const uint slot = uint(slots[column]);
    if (draws[column] != 1 || slot >= p.n_slots || pos[column] < 0) return;
    const uint loop = slot * (RING + p.capacity), mine = slot * DRAFT_WORDS, text = slot * p.words;
    const int step = loop_words[loop], status = loop_words[loop + 1u], limit = loop_words[loop + 2u], at = pos[column];
    const int made = draft[mine + MADE];
    int room = min(draft[mine + MOST], int(p.words) - 1 - at);
    if (status != 0 || room <= 0) return;
    const bool known = draft[mine + MODE] == KNOWN;
    if (!known) {
        for (int s = made + int(tid); s < step; s += WG_SIZE)
            texts[text + uint(at - step + 1 + s)] = loop_words[loop + RING + uint(s) % p.capacity];
    }
    if (tid == 0u) best = 0u;
    memoryBarrierBuffer();
    barrier();
    if (tid == 0u) draft[mine + MADE] = step;

    if (limit > 0) room = min(room, limit - step - 1);
    const uint end = uint(at) + 1u;
    if (!known && room > 0) {
        const int last = texts[text + end - 1u], least = draft[mine + MATCH];
        uint longest = 0u;
        for (int i = at - 1 - int(tid); i >= 0; i -= WG_SIZE) {
            if (texts[text + uint(i)] != last) continue;
            const uint reach = min(LONGEST, uint(i) + 1u);
            uint same = 1u;
            while (same < reach && texts[text + uint(i) - same] == texts[text + end - 1u - same]) same++;
            if (int(same) >= least) longest = max(longest, same << PLACE_BITS | uint(i));
        }
        if (longest != 0u) atomicMax(best, longest);
    }
    if (tid == 0u) found = uint(max(room, 0));
    barrier();
    const uint place = best & ((1u << PLACE_BITS) - 1u), period = end - 1u - place;
    for (uint c = tid; c < p.n; c += WG_SIZE) {
        if (uint(slots[c]) != slot || draws[c] < 2) continue;
        const uint i = uint(draws[c]) - 1u;
        int token = -1;
        if (int(i) <= room && page_of(slot, uint(at) + i) >= 0) {
            if (known) token = texts[text + uint(at) + i];
            else if (best != 0u) token = texts[text + place + 1u + (i - 1u) % period];
        }
        if (token < 0) atomicMin(found, i - 1u);
        tokens[c] = max(token, 0);
    }
    barrier();
    const uint count = int(found) < draft[mine + LEAST] ? 0u : found;
    for (uint c = tid; c < p.n; c += WG_SIZE) {
        if (uint(slots[c]) != slot || draws[c] < 2) continue;
        const uint row = uint(at) + uint(draws[c]) - 1u;
        const bool there = uint(draws[c]) - 1u <= count;
        pos[c] = there ? int(row) : -1;
        rows[c] = there ? page_of(slot, row) * int(p.page) + int(row % p.page) : -1;
    }
}

#version 450
// SAMPLE_DRAFTS_COLUMNS, last step: of each sequence drafts are accepted while they are what the columns before them picked; its loop
// advances by the tokens so made. As sample/accept.comp for one text.
//
// Bindings:
//   0  picked  I32 [n]: what each column picked, -1 of NaN; of no meaning where pos is -1
//   1  loops   I32 [n_slots, 32 + capacity], see sample/loop.glsl
//   2  tokens  I32 [n], 3 pos, 4 rows: of a sequence's last token they move on; all other columns become holes
//   5  slots   I32 [n]: whose column it is
//   6  draws   I32 [n]: 0: it picks nothing; 1: the sequence's last token; 1 + i: its draft i
//   7  pages   I32 [n_slots, max_pages]
//   8  draft   I32 [n_slots, 96], see vkback/ops/sampling/lookup.py: STEPS, DRAFTED, ACCEPTED, and both by place
//   9  seen    I32 [n_slots, 4 + vocab + n_ctx] (PENALIZED), see sample/penalties.comp: the tokens of all columns that counted are counted in
//
// One workgroup, a thread for each column.
//
// Defines: WG_SIZE, MAX_COLUMNS, PENALIZED 1 or nothing
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n, capacity, n_slots, page, max_pages, vocab, n_ctx;
} p;

layout(binding = 0) readonly buffer Picked { int picked[]; };
layout(binding = 1) buffer Loop { int loop_words[]; };
layout(binding = 2) buffer Tokens { int tokens[]; };
layout(binding = 3) buffer Pos { int pos[]; };
layout(binding = 4) writeonly buffer Rows { int rows[]; };
layout(binding = 5) readonly buffer Slots { int slots[]; };
layout(binding = 6) readonly buffer Draws { int draws[]; };
layout(binding = 7) readonly buffer Pages { int pages[]; };
layout(binding = 8) buffer Draft { int draft[]; };
#ifdef PENALIZED
layout(binding = 9) buffer Seen { int seen[]; };
#endif

const uint STEP = 0u, STATUS = 1u, LIMIT = 2u, N_EOS = 13u, EOS = 16u, RING = 32u, MAX_EOS = 16u;
const int NAN = 1, ENDED = 2, FULL = 3, NO_PAGE = 4;
const uint DRAFT_WORDS = 96u, STEPS = 8u, DRAFTED = 9u, ACCEPTED = 10u, DRAFTED_AT = 16u, ACCEPTED_AT = 48u;

shared int id[MAX_COLUMNS], token[MAX_COLUMNS], at[MAX_COLUMNS], role[MAX_COLUMNS];
shared uint slot[MAX_COLUMNS];

// The column of draft i of a sequence, p.n: none.
uint column_of(uint of, int i) {
    for (uint c = 0u; c < p.n; c++)
        if (slot[c] == of && role[c] == i + 1 && at[c] >= 0) return c;
    return p.n;
}

#ifdef PENALIZED
// What sample/penalties.comp does for one token of a sequence.
void count_in(uint of, int t, int place) {
    const uint mine = of * (4u + p.vocab + p.n_ctx), counts = mine + 4u, places = counts + p.vocab;
    const int last_n = seen[mine + 3u], leaves = place - last_n;
    seen[counts + uint(t)] += 1;
    if (place < int(p.n_ctx)) seen[places + uint(place)] = t;
    if (leaves >= 0 && leaves < int(p.n_ctx)) seen[counts + uint(seen[places + uint(leaves)])] -= 1;
}
#endif

void take(uint column) {
    const uint mine = slot[column], loop = mine * (RING + p.capacity), counts = mine * DRAFT_WORDS;
    const int limit = loop_words[loop + LIMIT];
    int step = loop_words[loop + STEP], status = 0, row = -1;
    int made = 0, drafted = 0;
    while (column_of(mine, drafted + 1) < p.n) drafted++;
    uint from = column;
    while (true) {
        if (id[from] < 0) {
            status = NAN;
            break;
        }
        const int picks = id[from];
        loop_words[loop + RING + uint(step) % p.capacity] = picks;
#ifdef PENALIZED
        count_in(mine, token[from], at[column] + made);
#endif
        step++;
        made++;
        const uint n_eos = min(uint(loop_words[loop + N_EOS]), MAX_EOS);
        for (uint i = 0u; i < n_eos; i++)
            if (loop_words[loop + EOS + i] == picks) status = ENDED;
        if (status == 0 && limit > 0 && step >= limit) status = FULL;
        const uint next = uint(at[column] + made);
        const int page = next / p.page < p.max_pages ? pages[mine * p.max_pages + next / p.page] : -1;
        if (status == 0 && page < 0) status = NO_PAGE;
        row = page * int(p.page) + int(next % p.page);
        tokens[column] = picks;
        if (status != 0) break;
        from = column_of(mine, made);
        if (from == p.n || token[from] != picks) break;
    }
    loop_words[loop + STEP] = step;
    loop_words[loop + STATUS] = status;
    pos[column] = status == 0 ? at[column] + made : -1;
    rows[column] = status == 0 ? row : -1;
    if (drafted == 0) return;
    const int accepted = max(made, 1) - 1;
    draft[counts + STEPS] += 1;
    draft[counts + DRAFTED] += drafted;
    draft[counts + ACCEPTED] += accepted;
    for (uint i = 0u; i < uint(drafted); i++) draft[counts + DRAFTED_AT + i] += 1;
    for (uint i = 0u; i < uint(accepted); i++) draft[counts + ACCEPTED_AT + i] += 1;
}

void main() {
    const uint c = gl_LocalInvocationID.x;
    if (c < p.n) {
        id[c] = picked[c];
        token[c] = tokens[c];
        at[c] = pos[c];
        slot[c] = uint(slots[c]);
        role[c] = draws[c];
    }
    barrier();
    if (c >= p.n || at[c] < 0) return;
    if (role[c] == 1 && slot[c] < p.n_slots && loop_words[slot[c] * (RING + p.capacity) + STATUS] == 0) {
        take(c);
    } else {
        pos[c] = -1;
        rows[c] = -1;
    }
}

// State of the generation loop on the device, and its step. Words of `loop`, I32 [32 + capacity]; with COLUMNS there is one for each slot:
//   0 step        tokens made so far
//   1 status      0: running, 1: NaN among the logits, 2: an end-of-text token was made; of columns also 3: the limit is reached,
//                 4: the sequence has no page for its next row. Unless it is 0, nothing changes any more
//   2 limit       of columns: most tokens to make; 0: no limit
//   8..13         temp F32, top_k, top_p F32, min_p F32, seed, n_eos
//   16..31        end-of-text ids
//   32..          ring buffer of the ids made: step s at 32 + s % capacity
//
//   IN_LOOP(word)           index of a word of the column's loop
//   bool loop_stopped()     without COLUMNS
//   uint column_fate()      with COLUMNS: HOLE: nothing happens in the column; ENDS: it becomes a hole; DRAWS: it picks a token
//   void column_end()       the column becomes a hole
//   void loop_advance(int id)    one thread calls, after every workgroup of the column has called loop_stopped or column_fate; id -1: NaN
//
// With IDS, and none of those, what was picked is the place of a token, and `ids` has its id.
//
// With DRAFTS the columns are positions of one text, and what each picks is only noted in `picked`: sample/accept.comp moves the loop on.
// column_fate() is then HOLE or DRAWS. So with PICKS beside COLUMNS, where several columns may be of
// one sequence: sample/accept_columns.comp.
//
// Needs LOOP_BIND, the binding of `loop` (tokens and pos follow it, with IDS also ids, with COLUMNS rows, slots, draws and pages; with DRAFTS picked and
// pos, with PICKS also slots and draws), and push constants p.capacity, with COLUMNS also p.n_slots, p.page (rows of a page) and
// p.max_pages (pages that a slot can have).

#include "sample/column.glsl"

const uint LOOP_STEP = 0u, LOOP_STATUS = 1u, LOOP_TEMP = 8u, LOOP_TOP_K = 9u, LOOP_TOP_P = 10u, LOOP_MIN_P = 11u, LOOP_SEED = 12u;
const uint LOOP_N_EOS = 13u, LOOP_EOS = 16u, LOOP_RING = 32u, MAX_EOS = 16u;
const int STATUS_NAN = 1, STATUS_EOS = 2;

layout(binding = LOOP_BIND) buffer Loop { int loop_words[]; };
#if defined(DRAFTS) || defined(PICKS)
layout(binding = LOOP_BIND + 1) writeonly buffer Picked { int picked[]; };
layout(binding = LOOP_BIND + 2) readonly buffer Pos { int pos[]; };
#else
layout(binding = LOOP_BIND + 1) writeonly buffer Tokens { int tokens[]; };
layout(binding = LOOP_BIND + 2) buffer Pos { int pos[]; };
#endif
#ifdef PICKS
layout(binding = LOOP_BIND + 3) readonly buffer Slots { int slots[]; };
layout(binding = LOOP_BIND + 4) readonly buffer Draws { int draws[]; };
#elif defined(COLUMNS)
layout(binding = LOOP_BIND + 3) writeonly buffer Rows { int rows[]; };
layout(binding = LOOP_BIND + 4) readonly buffer Slots { int slots[]; };
layout(binding = LOOP_BIND + 5) readonly buffer Draws { int draws[]; };
layout(binding = LOOP_BIND + 6) readonly buffer Pages { int pages[]; };
#endif

#ifdef IDS
layout(binding = LOOP_BIND + 3) readonly buffer Ids { int ids[]; };
#endif

#define IN_LOOP(word) IN_SLOT(word, LOOP_RING + p.capacity)

const uint HOLE = 0u, ENDS = 1u, DRAWS = 2u;

#if defined(DRAFTS) || defined(PICKS)
uint column_fate() {
#ifdef PICKS
    if (pos[COLUMN] < 0 || uint(slots[COLUMN]) >= p.n_slots || draws[COLUMN] == 0) return HOLE;
#else
    if (pos[COLUMN] < 0) return HOLE;
#endif
    return loop_words[IN_LOOP(LOOP_STATUS)] == 0 ? DRAWS : HOLE;
}

void column_end() {}

void loop_advance(int id) {
    picked[COLUMN] = id;
}
#else
#ifdef COLUMNS
const uint LOOP_LIMIT = 2u;
const int STATUS_LENGTH = 3, STATUS_NO_PAGE = 4;

uint column_fate() {
    if (pos[COLUMN] < 0) return HOLE;
    if (draws[COLUMN] == 0 || uint(slots[COLUMN]) >= p.n_slots) return ENDS;
    return loop_words[IN_LOOP(LOOP_STATUS)] == 0 ? DRAWS : ENDS;
}

void column_end() {
    pos[COLUMN] = -1;
    rows[COLUMN] = -1;
}

// Gives the next step of a column the row that its K and V are stored in, or ends the column. step: tokens made.
void column_advance(int step) {
    const int limit = loop_words[IN_LOOP(LOOP_LIMIT)];
    const uint at = uint(pos[COLUMN]);
    int status = loop_words[IN_LOOP(LOOP_STATUS)];
    if (status == 0 && limit > 0 && step >= limit) status = STATUS_LENGTH;
    const int page = at / p.page < p.max_pages ? pages[IN_SLOT(at / p.page, p.max_pages)] : -1;
    if (status == 0 && page < 0) status = STATUS_NO_PAGE;
    if (status == 0) {
        rows[COLUMN] = page * int(p.page) + int(at % p.page);
    } else {
        loop_words[IN_LOOP(LOOP_STATUS)] = status;
        column_end();
    }
}
#else
bool loop_stopped() {
    return loop_words[LOOP_STATUS] != 0;
}
#endif

void loop_advance(int id) {
    if (id < 0) {
        loop_words[IN_LOOP(LOOP_STATUS)] = STATUS_NAN;
#ifdef COLUMNS
        column_end();
#endif
        return;
    }
#ifdef IDS
    id = ids[id];
#endif
    const int step = loop_words[IN_LOOP(LOOP_STEP)];
    tokens[COLUMN] = id;
    pos[COLUMN] += 1;
    loop_words[IN_LOOP(LOOP_RING + uint(step) % p.capacity)] = id;
    loop_words[IN_LOOP(LOOP_STEP)] = step + 1;
    const uint n_eos = min(uint(loop_words[IN_LOOP(LOOP_N_EOS)]), MAX_EOS);
    for (uint i = 0; i < n_eos; i++)
        if (loop_words[IN_LOOP(LOOP_EOS + i)] == id) loop_words[IN_LOOP(LOOP_STATUS)] = STATUS_EOS;
#ifdef COLUMNS
    column_advance(step + 1);
#endif
}
#endif

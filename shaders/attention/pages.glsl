// Rows of a sequence in pages of PAGE rows: row r is row r % PAGE of page pages[page_table + r / PAGE], counted over the pages of all sequences.
//
//   page_table          index of the sequence's first page, set once
//   find_pages(base)    call before `physical` of the rows base .. base + ROWS - 1, of which only those before `hi` count. Its loads do not
//                       wait for anything, so it stands well ahead of their use
//   physical(row)       where a row lies
//
// Defines: PAGE BIND_SLOTS BIND_PAGES, ROWS (of a chunk). Needs last_row().
layout(binding = BIND_SLOTS) readonly buffer Slots { int slots[]; };
layout(binding = BIND_PAGES) readonly buffer Pages { int pages[]; };

uint page_table;

uint last_row();

uint page_of(uint row) { return uint(pages[page_table + row / PAGE]); }

// How far the row lies behind its number in the sequence.
uint shift_of(uint row) { return (page_of(row) - row / PAGE) * PAGE; }

#if ROWS <= PAGE
// A chunk lies in two pages at most.
uint second_page, first_shift, second_shift;

void find_pages(uint base) {
    const uint first = min(base, last_row());
    second_page = (first / PAGE + 1u) * PAGE;
    first_shift = shift_of(first);
    second_shift = shift_of(min(base + ROWS - 1u, last_row()));
}

uint physical(uint row) { return row + (row < second_page ? first_shift : second_shift); }
#else
#define find_pages(base)
uint physical(uint row) { return row + shift_of(row); }
#endif

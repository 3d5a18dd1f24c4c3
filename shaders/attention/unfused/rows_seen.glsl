// The rows of its sequence that a token sees, for the kernels of attention as nodes of its own.
//
//   uvec2 rows_seen(uint t)    the first one, and the one behind the last; both 0 of padding
//   uint row_in_cache(uint r)  where row r of the sequence lies: with PAGE call find_sequence(t) before (attention/pages.glsl)
//
// Defines: SPANS [PAGE BIND_SLOTS BIND_PAGES]. Needs pos[], push constants p.rows, p.window [p.max_pages].
#include "attention/window.glsl"

uvec2 rows_seen(uint t) {
#if SPANS
    const uint end = min(uint(pos[2u * t + 1u] + 1), p.rows);
    return uvec2(min(uint(pos[2u * t]), end), end);
#else
    const uint end = min(uint(pos[t] + 1), p.rows);
    return uvec2(end > 0u ? first_row(end, p.window) : 0u, end);
#endif
}

#ifdef PAGE
layout(binding = BIND_SLOTS) readonly buffer Slots { int slots[]; };
layout(binding = BIND_PAGES) readonly buffer Pages { int pages[]; };

uint page_table;

void find_sequence(uint t) { page_table = uint(slots[t]) * p.max_pages; }
uint row_in_cache(uint r) { return uint(pages[page_table + r / PAGE]) * PAGE + r % PAGE; }
#else
#define find_sequence(t)
#define row_in_cache(r) (r)
#endif

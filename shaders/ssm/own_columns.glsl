// The tokens of a sequence in a step with drafts (BIND_DRAWS): its last one (draws 1) and its drafts (draws 1 + i), without gaps, in any columns.
//
//   uint own_columns[]             the column of token i, 0: the last one of the text, i: its draft i
//   uint own_count                 how many there are
//   void gather_columns(uint of)   every thread calls it: own_columns and own_count of the sequence in column `of`; where that is a hole, of
//                                  this column alone
//   bool drafted(uint of)          whether the column has a draft of its sequence
//
// Needs buffers `int pos[]`, `int slots[]` and `int draws[]`, p.n, the number of columns, and WG_SIZE.
//
// Defines: MAX_OWN, the most tokens of a sequence

shared uint own_columns[MAX_OWN];
shared uint own_count;

bool drafted(uint of) {
    return pos[of] >= 0 && draws[of] > 1;
}

void gather_columns(uint of) {
    const uint tid = gl_LocalInvocationIndex;
    for (uint i = tid; i < MAX_OWN; i += WG_SIZE) own_columns[i] = p.n;
    barrier();
    if (pos[of] >= 0) {
        for (uint c = tid; c < p.n; c += WG_SIZE)
            if (slots[c] == slots[of] && draws[c] >= 1 && draws[c] <= MAX_OWN && pos[c] >= 0) own_columns[draws[c] - 1] = c;
    }
    barrier();
    if (tid == 0u) {
        uint count = 0u;
        while (count < MAX_OWN && own_columns[count] < p.n) count++;
        own_count = max(count, 1u);
        if (count == 0u) own_columns[0] = of;
    }
    barrier();
}

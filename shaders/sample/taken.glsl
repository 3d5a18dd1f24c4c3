// Tokens that go through the model in one step with drafts: of one text those of columns 0, 1, ...; with COLUMNS those of the sequence of
// the workgroup's column, in any columns: draws 1 is its last token, 1 + i its draft i, without gaps.
//
//   gather_taken()   every thread of the workgroup calls it first
//   int last_taken() number of the column's own token among them
//   int taken(i)     token i of the sequence, 0 to last_taken(), at position pos[COLUMN] - last_taken() + i
//
// Needs sample/column.glsl, buffers `int tokens[]` and `int pos[]`, with COLUMNS also slots and draws; a workgroup for each column along y.
//
// Defines: with COLUMNS MAX_COLUMNS

#ifdef COLUMNS
shared int taken_tokens[MAX_COLUMNS];

void gather_taken() {
    for (uint i = gl_LocalInvocationID.x; i < MAX_COLUMNS; i += WG_SIZE) taken_tokens[i] = 0;
    barrier();
    for (uint c = gl_LocalInvocationID.x; c < gl_NumWorkGroups.y; c += WG_SIZE)
        if (slots[c] == slots[COLUMN] && draws[c] >= 1 && draws[c] <= MAX_COLUMNS && pos[c] >= 0) taken_tokens[draws[c] - 1] = tokens[c];
    barrier();
}

int last_taken() {
    return min(draws[COLUMN], MAX_COLUMNS) - 1;
}

int taken(int i) {
    return taken_tokens[i];
}
#else
void gather_taken() {}

int last_taken() {
    return int(COLUMN);
}

int taken(int i) {
    return tokens[i];
}
#endif

// The first row that a token sees whose own row is the one before `end` (end > 0). window: rows that it sees at most, 0: all; with CHUNK_BIT it
// sees those of its own chunk, chunks being so many rows long.
#define CHUNK_BIT 0x80000000u

uint first_row(uint end, uint window) {
    const uint rows = window & ~CHUNK_BIT;
    if (rows == 0u) return 0u;
    if ((window & CHUNK_BIT) != 0u) return (end - 1u) / rows * rows;
    return end > rows ? end - rows : 0u;
}

// What the cooperative-matrix kernels of attention share: moving blocks of the cache into shared memory, which rows the queries of a tile see,
// and which element of a sum matrix has which row and column.
//
// Include attention/prompt/prompt_iface.glsl and attention/cache_load.glsl first. The including shader has ROWS, HD, WIDTH (HD rounded up to whole
// matrices), ROW_WORDS = HD / 8, PITCH (16-byte words from row to row in shared memory), THREAD_WORDS (words of a block that a thread moves),
// TILE_Q, NS, ELEMENTS (of a sum matrix, per lane), MAXIMA_PITCH = FN / 4 + 1, and shared uvec4 kv_rows[].

shared uvec2 visible[TILE_Q];  // rows that each query sees (visible_rows)

uint element_position[ELEMENTS];  // of each element: row * 256 + column
uint lo, hi;                      // rows that any query of the tile sees

// Loads this thread's words of a block into registers. Rows before `lo` or from `hi` on are replaced by the nearest one inside:
// no query sees them, but their V must be finite.
#define FETCH(LOADER, INTO)                                                                                                     \
    const uint first = kv_head() * p.n_ctx;                                                                                     \
    if (WIDTH == HD && base >= lo && base + ROWS <= hi) {                                                                       \
        [[unroll]] for (uint i = 0; i < THREAD_WORDS; i++)                                                                      \
            if (ROWS * ROW_WORDS % WG == 0 || i * WG + gl_LocalInvocationIndex < ROWS * ROW_WORDS)                              \
                INTO[i] = LOADER((first + base) * ROW_WORDS + gl_LocalInvocationIndex + i * WG);                                \
    } else {                                                                                                                    \
        [[unroll]] for (uint i = 0; i < THREAD_WORDS; i++) {                                                                    \
            const uint at = i * WG + gl_LocalInvocationIndex, row = base + at / (WIDTH / 8), word = at % (WIDTH / 8);           \
            const uvec4 words = LOADER((first + clamp(row, lo, hi - 1u)) * ROW_WORDS + min(word, ROW_WORDS - 1u));              \
            INTO[i] = word < ROW_WORDS ? words : uvec4(0u);                                                                     \
        }                                                                                                                       \
    }

uvec4 as_f16(uvec4 raw, uint type) {
    if (type == CACHE_F16) return raw;
    const vec4 a = decode_low4(raw, type), b = decode_high4(raw, type);
    return uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}

#define PUT(FROM, FIRST, TYPE)                                                                                                  \
    [[unroll]] for (uint i = 0; i < THREAD_WORDS; i++) {                                                                        \
        const uint at = i * WG + gl_LocalInvocationIndex;                                                                       \
        if (ROWS * (WIDTH / 8) % WG == 0 || at < ROWS * (WIDTH / 8))                                                            \
            kv_rows[(FIRST + at / (WIDTH / 8)) * PITCH + at % (WIDTH / 8)] = as_f16(FROM[i], TYPE);                             \
    }

// Finds the row and column of each element of a sum matrix that this lane holds, which the specification leaves to the driver:
// loads a matrix whose elements are their own positions.
void find_element_positions(uint mine) {
    for (uint at = gl_SubgroupInvocationID; at < FM * FN / 4; at += SG) {
        const uint row = at / (FN / 4), quad = at % (FN / 4);
        kv_rows[mine + row * MAXIMA_PITCH + quad] = floatBitsToUint(vec4(float(row * 256u + 4u * quad)) + vec4(0.0, 1.0, 2.0, 3.0));
    }
    subgroup_sync();
    MATRIX_SUM numbers;
    coopMatLoad(numbers, kv_rows, mine, MAXIMA_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) element_position[e] = uint(numbers[e]);
    subgroup_sync();
}

// Masks the scores of rows that a query may not see. first_row: the first query row of the matrix.
void mask_scores(uint first_row, uint base, inout MATRIX_SUM score[NS]) {
    [[unroll]] for (uint e = 0; e < ELEMENTS; e++) {
        const uvec2 rows = visible[first_row + element_position[e] / 256u];
        [[unroll]] for (uint s = 0; s < NS; s++) {
            const uint row = base + s * FN + element_position[e] % 256u;
            score[s][e] = row >= rows.x && row < rows.y ? score[s][e] : MASKED;
        }
    }
}

// Sets lo and hi. Returns (first, end) of the rows that all queries see: blocks inside this range need no mask.
uvec2 find_range() {
    uvec2 any = uvec2(0xffffffffu, 0u), every = uvec2(0u, 0xffffffffu);
    for (uint i = gl_SubgroupInvocationID; i < TILE_Q; i += SG) {
        const uvec2 rows = visible[i];
        if (rows.y > 0u) any.x = min(any.x, rows.x);
        any.y = max(any.y, rows.y);
        every = uvec2(max(every.x, rows.x), min(every.y, rows.y));
    }
    lo = subgroupMin(any.x);
    hi = subgroupMax(any.y);
    return uvec2(subgroupMax(every.x), subgroupMin(every.y));
}

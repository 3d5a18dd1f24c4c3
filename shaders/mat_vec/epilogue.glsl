// What becomes of the row sums: bias, GLU, residual, then F32 or Q8_1.

// Bias and residual of this lane's output row, fetched before the walk so that the end need not wait for them.
float addend[COLS];

void fetch_addend() {
    const uint row = p.y_offset + min(first_row + lane, p.m - 1u);
    for (uint c = 0; c < COLS; c++) {
        addend[c] = 0.0;
#ifdef BIND_BIAS
        addend[c] += bias1[row];
#endif
#ifdef BIND_RESIDUAL
        addend[c] += residual1[min(y_row + c, p.n - 1u) * p.y_stride + row];
#endif
    }
}

// Output row `i` of this thread's slot for token c.
float finished(uint tid, uint turn, uint i, uint c) {
#if GLU
    const float gate = row_total(tid, turn, 2u * i, c);
    return gate / (1.0 + exp(-gate)) * row_total(tid, turn, 2u * i + 1u, c);
#else
    return row_total(tid, turn, i, c) + addend[c];
#endif
}

#if Y_TYPE == Y_F32

void epilogue(uint tid, uint turn, uint tile) {
    if (lane >= (ROWS >> GLU) || first_row + (lane << GLU) >= p.m) return;
    for (uint c = 0; c < COLS; c++)
        if (IDS != 0 || y_row + c < p.n) y1[(y_row + c) * p.y_stride + p.y_offset + (first_row >> GLU) + lane] = finished(tid, turn, lane, c);
}

#else

shared float staged[1 + TILES][COLS][TILE_OUT];

// Thread t quantizes values 4t..4t+3 of the tile's rows; it looks at the whole unit for the largest and, first of each half, at the
// half for the sum.
void store_q8_1(uint t, uint turn, uint tile, uint c) {
    const uint unit = t >> 3;
    float largest = 0.0;
    for (uint i = 0; i < 32; i++) largest = max(largest, abs(staged[turn][c][unit * 32 + i]));
    const float d = largest / 127.0, inverse = d > 0.0 ? 1.0 / d : 0.0;
    uint word = 0;
    for (uint i = 0; i < 4; i++) word |= (uint(int(roundEven(staged[turn][c][t * 4 + i] * inverse))) & 0xffu) << (8 * i);

    const uint out_unit = (p.y_offset + tile * TILE_OUT) / 32 + unit;
    const uint base = (y_row + c) * p.y_stride * 4;
    const uint half_index = (t >> 2) & 1;
    yw[base + (half_index * p.y_units + out_unit) * 4 + (t & 3)] = word;
    if ((t & 7) == 0) {
        vec2 sums = vec2(0.0);
        for (uint i = 0; i < 16; i++) {
            sums.x += roundEven(staged[turn][c][unit * 32 + i] * inverse);
            sums.y += roundEven(staged[turn][c][unit * 32 + 16 + i] * inverse);
        }
        const uint ds = base + p.y_units * 8 + out_unit * 2;
        yw[ds] = floatBitsToUint(d);
        yw[ds + 1] = packHalf2x16(sums);
    }
}

void epilogue(uint tid, uint turn, uint tile) {
    if (lane < (ROWS >> GLU))
        for (uint c = 0; c < COLS; c++)
            staged[turn][c][(tid / LANES) * (ROWS >> GLU) + lane] = first_row + (lane << GLU) < p.m ? finished(tid, turn, lane, c) : 0.0;
    barrier();
    for (uint t = tid; t < TILE_OUT / 4; t += WG)
        if (tile * TILE_OUT + t * 4 < (p.m >> GLU))
            for (uint c = 0; c < COLS; c++)
                if (IDS != 0 || y_row + c < p.n) store_q8_1(t, turn, tile, c);
}

#endif

// What becomes of the row sums: bias, GLU, residual, then F32 or Q8_1.

// Output row `i` of this thread's slot for token c.
float finished(uint tid, uint i, uint row0, uint y_row, uint c) {
#if GLU
    const float gate = row_total(tid, 2u * i, c);
    return gate / (1.0 + exp(-gate)) * row_total(tid, 2u * i + 1u, c);
#else
    float v = row_total(tid, i, c);
    const uint row = p.y_offset + row0 + i;
  #ifdef BIND_BIAS
    v += bias1[row];
  #endif
  #ifdef BIND_RESIDUAL
    v += residual1[(y_row + c) * p.y_stride + row];
  #endif
    return v;
#endif
}

#if Y_TYPE == Y_F32

void epilogue(uint tid, uint group, uint row0, uint y_row) {
    const uint i = tid % LANES;
    if (i >= (ROWS >> GLU) || row0 + (i << GLU) >= p.m) return;
    for (uint c = 0; c < COLS; c++)
        if (IDS != 0 || y_row + c < p.n) y1[(y_row + c) * p.y_stride + p.y_offset + (row0 >> GLU) + i] = finished(tid, i, row0, y_row, c);
}

#else

shared float staged[COLS][GROUP_OUT];

// Thread t quantizes values 4t..4t+3 of the workgroup's rows; it looks at the whole unit for the largest and, first of each half, at the
// half for the sum.
void store_q8_1(uint t, uint group, uint y_row, uint c) {
    const uint unit = t >> 3;
    float largest = 0.0;
    for (uint i = 0; i < 32; i++) largest = max(largest, abs(staged[c][unit * 32 + i]));
    const float d = largest / 127.0, inverse = d > 0.0 ? 1.0 / d : 0.0;
    uint word = 0;
    for (uint i = 0; i < 4; i++) word |= (uint(int(roundEven(staged[c][t * 4 + i] * inverse))) & 0xffu) << (8 * i);

    const uint out_unit = (p.y_offset + group * GROUP_OUT) / 32 + unit;
    const uint base = (y_row + c) * p.y_stride * 4;
    const uint half_index = (t >> 2) & 1;
    yw[base + (half_index * p.y_units + out_unit) * 4 + (t & 3)] = word;
    if ((t & 7) == 0) {
        vec2 sums = vec2(0.0);
        for (uint i = 0; i < 16; i++) {
            sums.x += roundEven(staged[c][unit * 32 + i] * inverse);
            sums.y += roundEven(staged[c][unit * 32 + 16 + i] * inverse);
        }
        const uint ds = base + p.y_units * 8 + out_unit * 2;
        yw[ds] = floatBitsToUint(d);
        yw[ds + 1] = packHalf2x16(sums);
    }
}

void epilogue(uint tid, uint group, uint row0, uint y_row) {
    const uint i = tid % LANES;
    if (i < (ROWS >> GLU))
        for (uint c = 0; c < COLS; c++)
            staged[c][(tid / LANES) * (ROWS >> GLU) + i] = row0 + (i << GLU) < p.m ? finished(tid, i, row0, y_row, c) : 0.0;
    barrier();
    for (uint t = tid; t < GROUP_OUT / 4; t += WG)
        if (group * GROUP_OUT + t * 4 < (p.m >> GLU))
            for (uint c = 0; c < COLS; c++)
                if (IDS != 0 || y_row + c < p.n) store_q8_1(t, group, y_row, c);
}

#endif

// Where the items of a unit lie in the planes of a tensor. Needs the push constants `p` of quant/weights.glsl.
//
//   K_UNITS    units of a row, where a kernel is built for one length of rows
//   UNIT_STEP  a power of two that every Place's `unit` is a multiple of
//   UNIT_EIGHTS  a constant; not 0: rows are whole eights of units, a Place's `unit` and `unit + units_on` lie in the same one, and `units_on` is a
//              multiple of 4: what eight units share is then seen to be one item

#ifdef K_UNITS
#define ROW_UNITS uint(K_UNITS)
#else
#define ROW_UNITS p.w.units
#endif
#ifndef UNIT_STEP
#define UNIT_STEP 1
#endif

// Unit `unit + units_on` of row `row + rows_on`, where what is `_on` is a constant: what a thread loads then lies at constant distances from one
// address for each plane, and needs little arithmetic of its own.
struct Place {
    uint row, unit;
    uint rows_on, units_on;
};

Place place(uint row, uint unit) { return Place(row, unit, 0u, 0u); }

// An index to which a constant will be added. A compiler adds it to the address, once for all, only if it sees that the sum cannot wrap; no buffer
// has 2^32 bytes. Of items of 16 bytes it then sees that the distance in bytes has 32 bits, too.
#define MOST_QUADS 0x0fffffffu
#define MOST_PAIRS 0x1fffffffu
#define MOST_WORDS 0x3fffffffu
uint foldable(uint index) { return index & MOST_WORDS; }

// 0, of which no compiler knows: no row has 2^31 units. NVIDIA's makes one instruction of (word & MASK) | VALUE, or of a choice by exclusive or with a
// mask, if one of the constants is a value for it, and two if it knows both.
uint unknown_zero() { return p.w.units >> 31; }

// Number of the item that belongs to a unit, in a plane whose first is number `first` and where 2^shift units have `width` items, of which no
// buffer has more than `most`.
uint item_at(uint first, Place at, uint shift, uint width, uint most) {
#ifdef K_UNITS
    const uint items = ROW_UNITS >> shift;
#endif
#ifdef UNIT_EIGHTS
    if (UNIT_EIGHTS != 0)
        return ((first + (((at.row + at.rows_on) * ROW_UNITS + at.unit) >> shift) * width) & most) + (shift < 3u ? (at.units_on >> shift) * width : 0u);
#endif
    return
#ifdef K_UNITS
        ROW_UNITS % (1u << shift) == 0u && (at.units_on % (1u << shift) == 0u || at.units_on < UNIT_STEP)
            ? foldable(first + (at.row * items + (at.unit >> shift)) * width) + (at.rows_on * items + (at.units_on >> shift)) * width :
#endif
        first + (((at.row + at.rows_on) * ROW_UNITS + at.unit + at.units_on) >> shift) * width;
}

// The item of 16, 8 or 4 bytes that belongs to a unit in the plane that begins `first` 16-byte words into the tensor, where 2^shift units share an
// item; half_of and byte_of pick theirs out.
#define QUAD(first, at, shift) w4[item_at(first, at, shift, 1u, MOST_QUADS)]
#define PAIR(first, at, shift) w2[item_at((first) * 2u, at, shift, 1u, MOST_PAIRS)]
#define WORD(first, at, shift) w1[item_at((first) * 4u, at, shift, 1u, MOST_WORDS)]

// Number of a unit as far as its remainder by `period`, a power of two up to 16, goes.
uint unit_number(Place at, uint period) {
#ifdef UNIT_EIGHTS
    if (UNIT_EIGHTS != 0 && period <= 8u) return (at.unit & 7u) + at.units_on;
#endif
    const uint on = at.units_on % period == 0u ? 0u : at.units_on;
    return
#ifdef K_UNITS
        ROW_UNITS % period == 0u ? at.unit + on :
#endif
        (at.row + at.rows_on) * ROW_UNITS + at.unit + on;
}

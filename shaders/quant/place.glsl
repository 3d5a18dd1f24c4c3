// Addresses: where the data of a unit lies in the planes of a tensor. Needs the push constants `p` of quant/weights.glsl.
//
//   K_UNITS      units in a row, where a kernel is built for one row length
//   UNIT_STEP    a power of two that divides the `unit` of every Place
//   UNIT_EIGHTS  a constant; not 0: a row is a whole number of groups of eight units, `unit` and `unit + units_on` of a Place lie in the same
//                group, and `units_on` is a multiple of 4. The compiler then sees that what eight units share
//                (a block's head) is one item, loaded once

#ifdef K_UNITS
#define ROW_UNITS uint(K_UNITS)
#else
#define ROW_UNITS p.w.units
#endif
#ifndef UNIT_STEP
#define UNIT_STEP 1
#endif

// Unit `unit + units_on` of row `row + rows_on`. The `_on` parts are constants: all loads of a thread then lie at constant distances from one
// address per plane and need little address arithmetic of their own.
struct Place {
    uint row, unit;
    uint rows_on, units_on;
};

Place place(uint row, uint unit) { return Place(row, unit, 0u, 0u); }

// An index to which a constant will be added. The mask tells the compiler that the sum cannot wrap (no buffer has 2^32 bytes), so it may fold
// the constant into the load's address. For 16-byte items it also shows that the offset in bytes fits into 32 bits.
#define MOST_QUADS 0x0fffffffu
#define MOST_PAIRS 0x1fffffffu
#define MOST_WORDS 0x3fffffffu
uint foldable(uint index) { return index & MOST_WORDS; }

// A zero that the compiler cannot prove to be one: no row has 2^31 units. On NVIDIA, (word & MASK) | VALUE, or a bit select by xor and mask,
// compiles to one three-operand instruction if only one of MASK and VALUE is a known constant, but to two if both are.
// So one of them is combined with this zero.
uint unknown_zero() { return p.w.units >> 31; }

// Index of the item that belongs to a unit, in a plane whose first item has index `first` and where 2^shift units share `width` items. most: a
// mask for the largest index that a buffer can have.
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

// The item of 16, 8 or 4 bytes that belongs to a unit, in the plane that begins `first` 16-byte words into the tensor. 2^shift units share an
// item; half_of and byte_of then pick the unit's part of it.
#define QUAD(first, at, shift) w4[item_at(first, at, shift, 1u, MOST_QUADS)]
#define PAIR(first, at, shift) w2[item_at((first) * 2u, at, shift, 1u, MOST_PAIRS)]
#define WORD(first, at, shift) w1[item_at((first) * 4u, at, shift, 1u, MOST_WORDS)]

// The number of a unit, correct modulo `period`, a power of two up to 16.
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

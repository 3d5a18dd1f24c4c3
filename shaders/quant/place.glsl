// Addresses: where the data of a unit lies in the planes of a tensor. Needs the push constants `p` of quant/weights.glsl.
//
//   K_UNITS        units in a row, where a kernel is built for one row length
//   UNIT_STEP      a power of two that divides the `unit` of every Place
//   UNITS_ALIGNED  a constant; not 0: a row is a whole number of groups of eight units, `unit` and `unit + unit_offset` of a Place lie in the
//                  same group, and `unit_offset` is a multiple of 4, or 1 behind an even `unit`. The compiler then sees that what eight
//                  units share (a block's head) is one item, loaded once

#ifdef K_UNITS
#define ROW_UNITS uint(K_UNITS)
#else
#define ROW_UNITS p.w.units
#endif
#ifndef UNIT_STEP
#define UNIT_STEP 1
#endif

// Unit `unit + unit_offset` of row `row + row_offset`. The offsets are constants: all loads of a thread then lie at constant distances from
// one address per plane and need little address arithmetic of their own.
struct Place {
    uint row, unit;
    uint row_offset, unit_offset;
};

Place place(uint row, uint unit) { return Place(row, unit, 0u, 0u); }

// An index to which a constant will be added. The mask tells the compiler that the sum cannot wrap (no buffer has 2^32 bytes), so it may fold
// the constant into the load's address. For 16-byte items it also shows that the offset in bytes fits into 32 bits.
#define MAX_QUAD_INDEX 0x0fffffffu
#define MAX_PAIR_INDEX 0x1fffffffu
#define MAX_WORD_INDEX 0x3fffffffu
uint foldable(uint index) { return index & MAX_WORD_INDEX; }

// A zero that the compiler cannot prove to be one: no row has 2^31 units. On NVIDIA, (word & MASK) | VALUE compiles to one three-operand
// instruction if only one of MASK and VALUE is a known constant, but to two if both are. So one of them is combined with this zero.
uint unknown_zero() { return p.w.units >> 31; }

// A constant that the compiler does not know, for the same reason. It has to be a sum: constant ^ unknown_zero() would be taken apart.
uint hidden(uint constant) { return constant + unknown_zero(); }

// Index of the item that belongs to a unit, in a plane whose first item has index `first` and where 2^shift units share `width` items.
// max_index: a mask for the largest index that a buffer can have.
uint item_at(uint first, Place at, uint shift, uint width, uint max_index) {
#ifdef K_UNITS
    const uint items = ROW_UNITS >> shift;
#endif
#ifdef UNITS_ALIGNED
    if (UNITS_ALIGNED != 0)
        return ((first + (((at.row + at.row_offset) * ROW_UNITS + at.unit) >> shift) * width) & max_index) +
               (shift < 3u ? (at.unit_offset >> shift) * width : 0u);
#endif
    return
#ifdef K_UNITS
        ROW_UNITS % (1u << shift) == 0u && (at.unit_offset % (1u << shift) == 0u || at.unit_offset < UNIT_STEP)
            ? foldable(first + (at.row * items + (at.unit >> shift)) * width) + (at.row_offset * items + (at.unit_offset >> shift)) * width :
#endif
        first + (((at.row + at.row_offset) * ROW_UNITS + at.unit + at.unit_offset) >> shift) * width;
}

// The item of 16, 8 or 4 bytes that belongs to a unit, in the plane that begins `first` 16-byte words into the tensor. 2^shift units share an
// item; half_of and byte_of then pick the unit's part of it.
#define QUAD(first, at, shift) w4[item_at(first, at, shift, 1u, MAX_QUAD_INDEX)]
#define PAIR(first, at, shift) w2[item_at((first) * 2u, at, shift, 1u, MAX_PAIR_INDEX)]
#define WORD(first, at, shift) w1[item_at((first) * 4u, at, shift, 1u, MAX_WORD_INDEX)]

// The number of a unit, correct modulo `period`, a power of two up to 16.
uint unit_index(Place at, uint period) {
#ifdef UNITS_ALIGNED
    if (UNITS_ALIGNED != 0 && period <= 8u) return (at.unit & 7u) + at.unit_offset;
#endif
    const uint on = at.unit_offset % period == 0u ? 0u : at.unit_offset;
    return
#ifdef K_UNITS
        ROW_UNITS % period == 0u ? at.unit + on :
#endif
        (at.row + at.row_offset) * ROW_UNITS + at.unit + on;
}

// Where the items of a unit lie in the planes of a tensor. Needs the push constants `p` of quant/weights.glsl. Where a kernel is built for one length
// of rows, their units are K_UNITS.
// Units of a row.
#ifdef K_UNITS
#define ROW_UNITS uint(K_UNITS)
#else
#define ROW_UNITS p.w.units
#endif

// Unit `unit + units_on` of row `row + rows_on`, where what is `_on` is a constant: what a thread loads then lies at constant distances from one
// address for each plane, and needs no arithmetic of its own.
struct Place {
    uint row, unit;
    uint rows_on, units_on;
};

// Every Place has a `unit` that is a multiple of UNIT_STEP, a power of two.
#ifndef UNIT_STEP
#define UNIT_STEP 1
#endif

Place place(uint row, uint unit) { return Place(row, unit, 0u, 0u); }

// A compiler folds `index + constant` into the address only if it sees that the sum cannot wrap. No buffer has 2^30 items of 4 bytes.
#define FOLDS(index) ((index) & 0x3fffffffu)

// Number of the item that belongs to a unit in a plane whose first is number `first`, where 2^shift units have one item, or `width` of them.
#ifdef K_UNITS
uint item_at(uint first, Place at, uint shift, uint width) {
    const uint items = ROW_UNITS >> shift;
    return ROW_UNITS % (1u << shift) == 0u && (at.units_on % (1u << shift) == 0u || at.units_on < UNIT_STEP)
               ? FOLDS(first + (at.row * items + (at.unit >> shift)) * width) + (at.rows_on * items + (at.units_on >> shift)) * width
               : first + (((at.row + at.rows_on) * ROW_UNITS + at.unit + at.units_on) >> shift) * width;
}
#else
uint item_at(uint first, Place at, uint shift, uint width) {
    return first + (((at.row + at.rows_on) * ROW_UNITS + at.unit + at.units_on) >> shift) * width;
}
#endif

uint item_at(uint first, Place at, uint shift) { return item_at(first, at, shift, 1u); }

// Number of a unit among the items of its plane where each has one.
uint unit_at(Place at) { return item_at(0u, at, 0u, 1u); }

// The 32-bit word of plane i that holds the item of a unit, where 2^shift units share a word; half_of and byte_of pick the item out.
#define PLANE_WORD(i, at, shift) w1[item_at(p.w.plane[i] * 4u, at, shift)]

// Number of a unit as far as its remainder by `period`, a power of two, goes.
uint unit_number(Place at, uint period) {
    const uint unit = at.units_on % period == 0u ? at.unit : at.unit + at.units_on;
#ifdef K_UNITS
    return ROW_UNITS % period == 0u ? unit : (at.row + at.rows_on) * ROW_UNITS + unit;
#else
    return (at.row + at.rows_on) * ROW_UNITS + unit;
#endif
}

// IQ1_S: 256 weights in 50 bytes.  weight = d * (1 + 2 scale) * (digit - 1 + delta), delta = 1/8 or -1/8
// Planes:
//   qs  4                bits 0..7 of the codebook index of each 8 weights
//   qh  2                bits 8..10 of the four indices, 3 bits each; bits 12..14: scale; bit 15 set: delta is negative
//   d   2 per 256        f16
#define UNIT_INTS 1
#define UNIT_HALVES 0
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/iq1.glsl"

struct UnitRaw { uint qs; uint qh; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(WORD(0u, at, 0), WORD(p.w.plane[0], at, 1), WORD(p.w.plane[1], at, 4), unit_index(at, 16u));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    const uint qh = r.qh >> (16u * (r.index & 1u));
    [[unroll]] for (uint g = 0; g < 4; g++) {
        const uint digits = look_up(byte_of(r.qs, g) | (((qh >> (3 * g)) << 8) & 0x700u));
        q[2 * g] = digits & 0x03030303u;
        q[2 * g + 1] = (digits >> 2) & 0x03030303u;
    }
    scale = vec2(half_of(r.d, r.index >> 3) * float(1u + 2u * ((qh >> 12) & 7u)));
    bias = scale * ((qh & 0x8000u) == 0u ? 0.875 : 1.125);
}
#include "quant/decode_ints.glsl"

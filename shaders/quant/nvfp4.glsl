// NVFP4: 64 weights in 36 bytes. Planes: qs (E2M1 nibbles) 16, d 2 (UE4M3 scales of values 0..15 and of 16..31).
// weight = d / 2 * level, where level is twice the E2M1 value: 0 1 2 3 4 6 8 12 and their negatives (quant/e2m1.glsl).
#define UNIT_INTS 1
#define UNIT_HALVES 1
#define UNIT_BIAS 1
#define UNIT_SIGNED 0
#include "quant/e2m1.glsl"

struct UnitRaw { uvec4 qs; uint d; uint index; };

UnitRaw unit_load(Place at) {
    return UnitRaw(QUAD(0u, at, 0), WORD(p.w.plane[0], at, 1), unit_index(at, 2u));
}

// Half of a UE4M3 number: 4 exponent bits (bias 7), 3 fraction bits. The top bit is ignored; 0x7f stands for 0.
float ue4m3_to_f32_half(uint code) {
    const uint bits = code & 0x7fu;
    if (bits < 8u) return float(bits) * (1.0 / 1024.0);
    return code == 0x7fu ? 0.0 : uintBitsToFloat((bits << 20) + (119u << 23));
}

void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias) {
    e2m1_plus_12(r.qs, q);
    const uint d = r.d >> (16u * (r.index & 1u));
    scale = vec2(ue4m3_to_f32_half(d & 0xffu), ue4m3_to_f32_half((d >> 8) & 0xffu));
    bias = 12.0 * scale;
}
#include "quant/decode_ints.glsl"

#version 450
// Decodes rows of a weight: a box of rows on up to three axes, and of each row k columns, from unit unit0 on.
//
//   binding 0  weight in the device layout (quant/weights.glsl)
//   binding 1  y F32, or F16 (two to a word) if TO_F16 is 1: [box[0], box[1], box[2], k]
//
// One thread per unit of 32 weights.
//
// Defines: QUANT_FILE; WIDTH 4: k is a multiple of 4, 1: any k (F32 only)
#include "quant/weights.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    Weights w;
    uint box[3];
    uint stride[3];  // in rows of the weight
    uint row0;
    uint unit0;
    uint k;
} p;
#include "quant/place.glsl"
#include QUANT_FILE

#if TO_F16
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };
#elif WIDTH == 4
layout(std430, set = 0, binding = 1) writeonly buffer OutY { vec4 y[]; };
#else
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };
#endif

void main() {
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, WG_SIZE);
    barrier();
#endif
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint units = (p.k + 31u) / 32u;
    const uint row = i / units;
    const uint unit = i - row * units;
    const uint outer = row / p.box[2];
    if (outer >= p.box[0] * p.box[1]) return;
    const uint from = p.row0 + (outer / p.box[1]) * p.stride[0] + (outer % p.box[1]) * p.stride[1] + (row % p.box[2]) * p.stride[2];
    vec4 v[8];
    unit_decode(unit_load(place(from, p.unit0 + unit)), v);
    for (uint j = 0u; j < 8u; j++) {
        const uint column = 32u * unit + 4u * j;
#if TO_F16
        if (column < p.k) y[(row * p.k + column) / 2u] = packHalf2x16(v[j].xy);
        if (column + 2u < p.k) y[(row * p.k + column) / 2u + 1u] = packHalf2x16(v[j].zw);
#elif WIDTH == 4
        if (column < p.k) y[(row * p.k + column) / 4u] = v[j];
#else
        for (uint c = 0u; c < 4u; c++) if (column + c < p.k) y[row * p.k + column + c] = v[j][c];
#endif
    }
}

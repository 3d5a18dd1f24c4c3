#version 450
// GET_ROWS of a quantized table: decodes the rows and multiplies them by a number.
//
//   binding 0  table, rows row0 .. row0 + rows of it, in the device layout (quant/weights.glsl)
//   binding 1  ids I32 [n]
//   binding 2  y F32 [n, k]
//
// One thread per unit of 32 weights. A table may come in parts, one dispatch each: ids of other parts are skipped. An id outside the whole
// table gives zeros, written by the dispatch of the first part.
//
// Defines: QUANT_FILE; WIDTH 4: k is a multiple of 4; 1: any k
#include "quant/weights.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    Weights w;
    uint n;
    uint k;
    uint row0;
    uint rows;
    uint rows_total;
    float scale;
} p;
#include "quant/place.glsl"
#include QUANT_FILE

layout(std430, set = 0, binding = 1) readonly buffer InIds { int ids[]; };
#if WIDTH == 4
layout(std430, set = 0, binding = 2) writeonly buffer OutY { vec4 y[]; };
#else
layout(std430, set = 0, binding = 2) writeonly buffer OutY { float y[]; };
#endif

void main() {
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, WG_SIZE);
    barrier();
#endif
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint token = i / p.w.units;
    if (token >= p.n) return;
    const uint unit = i - token * p.w.units;
    // As an unsigned number, a negative id is beyond every table.
    const uint id = uint(ids[token]);
    const bool beyond = id >= p.rows_total;
    if (beyond ? p.row0 != 0u : id - p.row0 >= p.rows) return;
    vec4 v[8];
    if (beyond) {
        for (uint j = 0u; j < 8u; j++) v[j] = vec4(0.0);
    } else {
        unit_decode(unit_load(place(id - p.row0, unit)), v);
        for (uint j = 0u; j < 8u; j++) v[j] *= p.scale;
    }
    for (uint j = 0u; j < 8u; j++) {
        const uint column = 32u * unit + 4u * j;
#if WIDTH == 4
        if (column < p.k) y[(token * p.k + column) / 4u] = v[j];
#else
        for (uint c = 0u; c < 4u; c++) if (column + c < p.k) y[token * p.k + column + c] = v[j][c];
#endif
    }
}

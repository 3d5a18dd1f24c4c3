#version 450
// Second pass of a split-K product: adds the slices in order and applies the epilogue (bias, GLU, residual).
//
//   binding 0  partial sums of the slices of K, F32 [PARTS][n][m]
//   binding 1  y F32 [n][y_stride]
//   binding 2  bias F32 [m], binding 3 residual F32 [n][y_stride]; unused, any buffer, if there is none
//
// One thread per output row of a column (with QUADS, four neighbouring rows); gl_WorkGroupID.y is the column.
//
// Defines: WG, PARTS, HAS_BIAS, HAS_RESIDUAL, GLU (0, 1, 2), GLU_ALPHA, GLU_LIMIT; QUADS:
// 1 if m, y_stride and y_offset are multiples of 4 and there is neither bias nor GLU
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = WG) in;

layout(push_constant) uniform Push {
    uint m;         // weight rows
    uint n;         // columns
    uint y_stride;
    uint y_offset;  // output row of the first weight row
    uint w_row0;    // row of the whole tensor where these begin
} p;

layout(std430, set = 0, binding = 0) readonly buffer Parts { float parts[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Y { float y[]; };
layout(std430, set = 0, binding = 2) readonly buffer Bias { float bias[]; };
layout(std430, set = 0, binding = 3) readonly buffer Residual { float residual[]; };
layout(std430, set = 0, binding = 0) readonly buffer PartQuads { vec4 parts4[]; };
layout(std430, set = 0, binding = 1) writeonly buffer YQuads { vec4 y4[]; };
layout(std430, set = 0, binding = 3) readonly buffer ResidualQuads { vec4 residual4[]; };
#include "gemm/glu.glsl"

float sum_parts(uint column, uint row) {
    float sum = HAS_BIAS != 0 ? bias[p.w_row0 + row] : 0.0;
    [[unroll]] for (uint i = 0; i < PARTS; i++) sum += parts[(i * p.n + column) * p.m + row];
    return sum;
}

void main() {
#if QUADS
    const uint quad = gl_GlobalInvocationID.x, quads = p.m / 4u, to = (gl_WorkGroupID.y * p.y_stride + p.y_offset) / 4u + quad;
    if (quad >= quads) return;
    vec4 sum = vec4(0.0);
    [[unroll]] for (uint i = 0; i < PARTS; i++) sum += parts4[(i * p.n + gl_WorkGroupID.y) * quads + quad];
    if (HAS_RESIDUAL != 0) sum += residual4[to];
    y4[to] = sum;
    return;
#endif
    const uint row = gl_GlobalInvocationID.x, column = gl_WorkGroupID.y;
    if (row >= (GLU != 0 ? p.m / 2u : p.m)) return;
    const uint at = column * p.y_stride + p.y_offset + row;
    float v = GLU != 0 ? glu(sum_parts(column, 2u * row), sum_parts(column, 2u * row + 1u)) : sum_parts(column, row);
    if (HAS_RESIDUAL != 0) v += residual[at];
    y[at] = v;
}

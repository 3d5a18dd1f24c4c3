#version 450
// Measures the rate of cooperative matrices on registers: f16 times f16 with f32 sums.
//
//   binding 0  source F16 [FM * FK + FK * FN]: a matrix A, then a matrix B, row-major
//   binding 1  result F32 [FM][FN] for each subgroup and sum, so that the compiler keeps the work
//
// Each subgroup has ROWS matrices A and COLUMNS matrices B, and adds their products to ROWS * COLUMNS sums, p.rounds times.
#include "gemm/matrix.glsl"

layout(constant_id = 5) const uint ROWS = 4;
layout(constant_id = 6) const uint COLUMNS = 4;

layout(push_constant) uniform Push {
    uint rounds;
} p;

layout(std430, set = 0, binding = 0) readonly buffer Source { uvec4 source[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Result { float result[]; };

void main() {
    MATRIX_A a[ROWS];
    MATRIX_B b[COLUMNS];
    MATRIX_SUM sums[ROWS * COLUMNS];
    [[unroll]] for (uint i = 0; i < ROWS; i++) coopMatLoad(a[i], source, 0, FK / 8, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint j = 0; j < COLUMNS; j++) coopMatLoad(b[j], source, FM * FK / 8, FN / 8, gl_CooperativeMatrixLayoutRowMajor);
    // Make the matrices differ, or the compiler could compute one product for several.
    [[unroll]] for (uint i = 0; i < ROWS; i++) a[i] = a[i] * float16_t(float(i + 1) / 16.0);
    [[unroll]] for (uint j = 0; j < COLUMNS; j++) b[j] = b[j] * float16_t(float(j + 1) / 16.0);
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; i++) sums[i] = MATRIX_SUM(0.0);
    [[dont_unroll]] for (uint round = 0; round < p.rounds; round++)
        [[unroll]] for (uint i = 0; i < ROWS; i++)
            [[unroll]] for (uint j = 0; j < COLUMNS; j++) sums[i * COLUMNS + j] = coopMatMulAdd(a[i], b[j], sums[i * COLUMNS + j]);
    const uint first = (gl_WorkGroupID.x * gl_NumSubgroups + gl_SubgroupID) * ROWS * COLUMNS;
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; i++)
        coopMatStore(sums[i], result, (first + i) * FM * FN, FN, gl_CooperativeMatrixLayoutRowMajor);
}

#version 450
// Start-up check: finds which elements of cooperative matrices each lane holds. One subgroup.
//
//   binding 0  numbers F16, 0 1 2 ..., at least as many as a matrix has elements
//   binding 1  the same numbers, F32
//   binding 2  elements F32 [3][SG][16]: of A [FM][FK], B [FK][FN] and sums [FM][FN], each loaded row-major; -1 after the last
//
// vkback/program/fragments.py compares them with the layout that gemm/matrix.glsl describes.
#include "gemm/matrix.glsl"

layout(std430, set = 0, binding = 0) readonly buffer Numbers { uvec4 numbers[]; };
layout(std430, set = 0, binding = 1) readonly buffer Floats { float floats[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Elements { float elements[]; };

#define WRITE(MATRIX, NUMBER) \
    for (uint i = 0; i < 16u; i++) elements[(NUMBER * SG + gl_SubgroupInvocationID) * 16u + i] = -1.0; \
    for (uint i = 0; i < min(MATRIX.length(), 16); i++) elements[(NUMBER * SG + gl_SubgroupInvocationID) * 16u + i] = float(MATRIX[i]);

void main() {
    MATRIX_A a;
    coopMatLoad(a, numbers, 0, FK / 8, gl_CooperativeMatrixLayoutRowMajor);
    WRITE(a, 0u)
    MATRIX_B b;
    coopMatLoad(b, numbers, 0, FN / 8, gl_CooperativeMatrixLayoutRowMajor);
    WRITE(b, 1u)
    MATRIX_SUM sums;
    coopMatLoad(sums, floats, 0, FN, gl_CooperativeMatrixLayoutRowMajor);
    WRITE(sums, 2u)
}

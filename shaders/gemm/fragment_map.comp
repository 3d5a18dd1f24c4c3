#version 450
// Start-up check: does the driver distribute the elements of a matrix B over the lanes of a subgroup in the
// same way in two kernels? No specification promises it.
//
//   binding 0  matrix F16 [FK][FN], two to a word
//   binding 1  fragment: [SG][4] words, the eight elements of each lane; then one word, the number of elements per lane
//   binding 2  result F32 [FM][FN], column-major
//
// One subgroup. BACK 0 loads the matrix and writes its elements to `fragment`, lane by lane. BACK 1 builds a matrix from `fragment` and writes
// identity * matrix to `result`. If the host finds the original matrix there, activations may be packed as fragments (gemm/matrix.glsl).
#include "gemm/matrix.glsl"

layout(constant_id = 5) const uint BACK = 0;

layout(std430, set = 0, binding = 0) readonly buffer Matrix { uvec4 matrix[]; };
layout(std430, set = 0, binding = 1) buffer Fragment { uint fragment[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Result { float result[]; };

shared uvec4 identity[FM * FK / 8];

void main() {
    const uint lane = gl_SubgroupInvocationID;
    MATRIX_B b;
    if (BACK == 0) {
        coopMatLoad(b, matrix, 0, FN / 8, gl_CooperativeMatrixLayoutRowMajor);
        if (lane == 0u) fragment[4u * SG] = b.length();
        if (b.length() != 8) return;
        const uvec4 words = to_fragment(b);
        [[unroll]] for (uint i = 0; i < 4; i++) fragment[4u * lane + i] = words[i];
        return;
    }
    for (uint i = lane; i < FM * FK / 8; i += SG) {
        const uint row = i / (FK / 8), column = i % (FK / 8) * 8;
        uvec4 ones = uvec4(0u);
        if (row >= column && row < column + 8) ones[(row - column) / 2] = 0x3c00u << (16u * (row & 1u));
        identity[i] = ones;
    }
    subgroup_sync();
    MATRIX_A a;
    coopMatLoad(a, identity, 0, FK / 8, gl_CooperativeMatrixLayoutRowMajor);
    uvec4 words;
    [[unroll]] for (uint i = 0; i < 4; i++) words[i] = fragment[4u * lane + i];
    b = from_fragment(words);
    coopMatStore(coopMatMulAdd(a, b, MATRIX_SUM(0.0)), result, 0, FM, gl_CooperativeMatrixLayoutColumnMajor);
}

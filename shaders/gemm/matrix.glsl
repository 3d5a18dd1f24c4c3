// Cooperative matrices of f16 at subgroup scope, with their shapes as specialization constants; and how packed f16 activations are laid out.
//
// K order: in every group of four neighbours along K the middle two are swapped (0, 2, 1, 3), in weights and activations alike, so that no sum
// changes. Bytes 0 and 2 of a word of four weights then become two f16 by one mask, bytes 1 and 3 by a shift and a mask.
//
// Packed activations are f16 in K order, either
//   row-major   [columns][k / 8] 16-byte words, or
//   fragments   [columns / FN][k / FK][SG] 16-byte words: the eight elements that each lane of a subgroup holds of a FK x FN matrix B, so that
//               one load brings them into registers. The driver decides which elements those are; gemm/fragment_map.comp checks that it
//               decides the same in two kernels. FK * FN = 8 * SG.
//
// Some kernels keep track of rows in registers and must know which lane holds which elements. They rely on the layout that the check at
// start-up (vkback/program/fragments.py) looks for: ROW_LANES = T neighbouring lanes share rows. With G = SG / T groups of such lanes, lane l
// of a matrix A or of sums holds elements of row l / T, then of row l / T + G, and so on; of a matrix B, elements of column l / T, then of
// column l / T + G. The positions along K are the same in all rows of A and all columns of B.
// If A and sums have the same shape, a lane's elements of both have the same positions.
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint WG = 128;  // threads
layout(constant_id = 1) const uint SG = 32;   // lanes of a subgroup
layout(constant_id = 2) const uint FM = 16;   // matrices: A is FM x FK, B is FK x FN, sums are FM x FN
layout(constant_id = 3) const uint FN = 16;
layout(constant_id = 4) const uint FK = 16;

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, FM, FK, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, FK, FN, gl_MatrixUseB>
#define MATRIX_SUM coopmat<float, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

// A matrix B from the eight elements that each lane holds.
MATRIX_B from_fragment(uvec4 words) {
    MATRIX_B b;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const f16vec2 pair = unpackFloat2x16(words[i]);
        b[2 * i] = pair.x;
        b[2 * i + 1] = pair.y;
    }
    return b;
}

uvec4 to_fragment(MATRIX_B b) {
    uvec4 words;
    [[unroll]] for (uint i = 0; i < 4; i++) words[i] = packFloat2x16(f16vec2(b[2 * i], b[2 * i + 1]));
    return words;
}

void subgroup_sync() {
    subgroupMemoryBarrierShared();
    subgroupBarrier();
}

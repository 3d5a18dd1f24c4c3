// Cooperative matrices of f16 at subgroup scope, their shapes by specialization constants, and f16 in K order.
//
// K order: of every four neighbours along K the middle two are swapped (0, 2, 1, 3), in weights and activations alike, which leaves all
// sums as they are. Bytes 0 and 2 of a word of four weights become two f16 by one mask, bytes 1 and 3 by a shift and a mask.
//
// Packed activations are f16 in K order, one of:
//   row-major   [columns][k / 8] words of 16 bytes
//   fragments   [columns / FN][k / FK][SG] words of 16 bytes: the eight elements that a lane of a subgroup holds of a FK x FN matrix B.
//               Which these are is the driver's affair; mat_mul/fragment_map.comp finds out whether it does the same in two
//               kernels. FK * FN = 8 * SG.
//
// Which lane holds which elements is the driver's affair, too. Kernels that hold rows in registers take for granted what the check at start-up
// (vkback/program/fragments.py) found: ROW_LANES = T neighbouring lanes share rows. With G = SG / T groups of such lanes, lane l's elements of a
// matrix A or of sums are those of row l / T, then those of row l / T + G, and so on; its elements of a matrix B those of column l / T, then of
// column l / T + G. The places along K are the same in all rows of A and all columns of B; A's elements lie where those of sums do, if the
// matrices have the same shape.
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint WG = 128;  // threads
layout(constant_id = 1) const uint SG = 32;   // threads of a subgroup
layout(constant_id = 2) const uint FM = 16;   // shape of the matrices
layout(constant_id = 3) const uint FN = 16;
layout(constant_id = 4) const uint FK = 16;

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, FM, FK, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, FK, FN, gl_MatrixUseB>
#define MATRIX_SUM coopmat<float, gl_ScopeSubgroup, FM, FN, gl_MatrixUseAccumulator>

// A lane's eight elements of matrix B.
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

// Low-rank factors, such as LoRA's A [rank, width] and B [width, rank]: what the kernels of their products share.
//
//   binding 0  the factor, F32 in the planes of docs/weight_layout.md
//
// Kernels take eight values along the rank at a time (a chunk), and four neighbours along the width (a quad), so `width` is a multiple of 4.
//
// Defines: RANK_ROWS, 1: the factor is [rank, width], 0: [width, rank]
#extension GL_EXT_control_flow_attributes : require

layout(push_constant) uniform Push {
    uint units;  // units of 32 values in a row of the factor
    uint part;   // 16-byte words from plane to plane
    uint n;      // tokens
    uint width;
    uint rank;
    uint add;    // 1: add to what is there
} p;

layout(std430, set = 0, binding = 0) readonly buffer Factor { vec4 factor[]; };

// Values 4 i .. 4 i + 3 of a row of the factor.
vec4 factor_quad(uint row, uint i) { return factor[(i & 7u) * p.part + row * p.units + (i >> 3)]; }

// v[j]: four neighbours along the width, at rank 8 * chunk + j. Values past the rank are arbitrary.
void load_factor(uint quad, uint chunk, out vec4 v[8]) {
#if RANK_ROWS
    [[unroll]] for (uint j = 0u; j < 8u; j++) v[j] = factor_quad(min(8u * chunk + j, p.rank - 1u), quad);
#else
    [[unroll]] for (uint e = 0u; e < 4u; e++) {
        const vec4 low = factor_quad(4u * quad + e, 2u * chunk), high = factor_quad(4u * quad + e, 2u * chunk + 1u);
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            v[j][e] = low[j];
            v[4u + j][e] = high[j];
        }
    }
#endif
}

#version 450
// Packs activations as f16 (gemm/matrix.glsl) for gemm/coop_mat.comp; with NORM 1 and 2 the RMS norm of each row comes first.
//
//   binding 0  x F32 [rows][k]
//   binding 1  y F16: row-major or fragments
//   binding 2  norm weight F32 [k] (NORM 2)
//   binding 3  route (GROUPED)
//   binding 4  factors F32 [rows]: 1 / rms of each row, stored for other launches (FACTORS 1) or read as another launch stored it (FACTORS 2);
//              with NORM 3 what each row was divided by, for the product to undo
//   binding 5  the overflow word (gemm/overflow.glsl)
// A binding that a kernel does not need may be any buffer.
//
// A workgroup packs a group of columns: with FRAGMENTS the FN columns of a matrix, otherwise one per subgroup. Columns are tokens or, GROUPED,
// positions in the route's tiles; the row of x is then that of the slot. First each subgroup finds the factors of some of the columns, one at a
// time: sum of squares, or largest magnitude. Then the subgroups take turns along K, for fragments 64 values at a time: threads put f16 rows
// into shared memory, from where they are loaded as matrices. Workgroups along z share the turns; each finds the factors by itself. Groups
// without a column are skipped: each column of the product depends on its own column of x only, so stale values there do no harm.
//
// Defines: FRAGMENTS (1 needs cooperative matrices). Everything else is a specialization constant.
#if FRAGMENTS
#include "gemm/matrix.glsl"
#else
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint WG = 128;  // threads
layout(constant_id = 1) const uint SG = 32;   // lanes of a subgroup
#endif
#extension GL_KHR_shader_subgroup_arithmetic : require
layout(constant_id = 5) const uint NORM = 0;  // 0: none, 1: without weight, 2: with weight, 3: none, but each row is multiplied by a power of two
layout(constant_id = 6) const uint GROUPED = 0;  // 1: columns are positions in the route's tiles
layout(constant_id = 7) const uint TILE_N = 128;  // columns of a tile of the route
layout(constant_id = 8) const uint FACTORS = 0;  // 0: none, 1: stored, 2: read
#include "gemm/pack.glsl"
#define OVERFLOW_BINDING 5
#include "gemm/overflow.glsl"

layout(push_constant) uniform Push {
    uint n;         // columns
    uint k;         // values of a row of x
    uint y_stride;  // 16-byte words: per row, or per column of matrices
    uint tiles;     // grouped: column tiles that the route has room for
    uint x_shared;  // grouped: slots that share a row of x
    float scale;    // factor of everything
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 0) readonly buffer XQuads { vec4 x4[]; };
#if FRAGMENTS
layout(std430, set = 0, binding = 1) writeonly buffer Y { uvec4 y4[]; };
#else
layout(std430, set = 0, binding = 1) writeonly buffer Y { uvec2 y2[]; };
#endif
layout(std430, set = 0, binding = 2) readonly buffer NormWeight { float norm_weight[]; };
layout(std430, set = 0, binding = 3) readonly buffer Route { uint route[]; };
layout(std430, set = 0, binding = 4) buffer Factors { float row_factors[]; };

// The row of x of a column; NONE if there is none.
#define NONE 0xffffffffu
uint row_of(uint column) {
    if (GROUPED == 0) return column < p.n ? column : NONE;
    const uint tile = column / TILE_N, c = column % TILE_N;
    if (tile >= p.tiles || c >= route[4u * tile + 2u]) return NONE;
    return route[4u * p.tiles + route[4u * tile + 1u] + c] / p.x_shared;
}

// Values 4 * quad .. 4 * quad + 3 of a row; zeros if there is no row.
vec4 load_quad(uint row, uint quad) {
    const bool valid = row != NONE && 4u * quad < p.k;
    vec4 v;
    if ((p.k & 3u) == 0u) v = x4[valid ? row * (p.k >> 2) + quad : 0u];
    else
        [[unroll]] for (uint i = 0; i < 4; i++) v[i] = valid && 4u * quad + i < p.k ? x[row * p.k + 4u * quad + i] : 0.0;
    return valid ? v : vec4(0.0);
}

#define LOADS_IN_FLIGHT 8  // loads that a thread keeps in flight

// The power of two that brings the largest magnitude of a row to between 2^13 and 2^14: well below the overflow of f16, and as far as possible
// from its subnormals. Rows of (almost) zeros get 2^126.
float row_power_of_two(uint row) {
    uint magnitude = 0u;
    for (uint first = 0; 4u * first < p.k; first += LOADS_IN_FLIGHT * SG) {
        vec4 v[LOADS_IN_FLIGHT];
        [[unroll]] for (uint i = 0; i < LOADS_IN_FLIGHT; i++) v[i] = load_quad(row, first + i * SG + gl_SubgroupInvocationID);
        [[unroll]] for (uint i = 0; i < LOADS_IN_FLIGHT; i++) {
            const uvec4 bits = floatBitsToUint(v[i]) & 0x7fffffffu;
            magnitude = max(magnitude, max(max(bits.x, bits.y), max(bits.z, bits.w)));
        }
    }
    const uint exponent = max(subgroupMax(magnitude) >> 23, 14u);
    if (row != NONE && gl_WorkGroupID.z == 0u && gl_SubgroupInvocationID == 0u) row_factors[row] = uintBitsToFloat((exponent - 13u) << 23);
    return uintBitsToFloat((267u - exponent) << 23);
}

float find_factor(uint row) {
    if (NORM == 0) return p.scale;
    if (NORM == 3) return row_power_of_two(row);
    if (FACTORS == 2) return row == NONE ? 0.0 : p.scale * row_factors[row];
    vec4 squares = vec4(0.0);
    for (uint first = 0; 4u * first < p.k; first += LOADS_IN_FLIGHT * SG) {
        vec4 v[LOADS_IN_FLIGHT];
        [[unroll]] for (uint i = 0; i < LOADS_IN_FLIGHT; i++) v[i] = load_quad(row, first + i * SG + gl_SubgroupInvocationID);
        [[unroll]] for (uint i = 0; i < LOADS_IN_FLIGHT; i++) squares += v[i] * v[i];
    }
    const float factor = inversesqrt(subgroupAdd(dot(squares, vec4(1.0))) / float(p.k) + p.eps);
    if (FACTORS == 1 && row != NONE && gl_WorkGroupID.z == 0u && gl_SubgroupInvocationID == 0u) row_factors[row] = factor;
    return p.scale * factor;
}

uvec2 pack_quad(uint row, uint quad, float factor) {
    vec4 v = factor * load_quad(row, quad);
    if (NORM == 2)
        [[unroll]] for (uint i = 0; i < 4; i++) v[i] *= norm_weight[min(4u * quad + i, p.k - 1u)];
    return pack_four(track_overflow(v));
}

#if FRAGMENTS
#define STAGE_K 64  // values along K that a subgroup stages in shared memory
const uint PITCH = STAGE_K / 8 + 1;
const uint SUBGROUPS = WG / SG;
shared float factors[FN];
shared uvec4 rows[SUBGROUPS * FN * PITCH];

void main() {
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x, lane = gl_SubgroupInvocationID;
    const uint stage = gl_SubgroupID * FN * PITCH, end = p.y_stride / SG * FK;
    if (row_of(group * FN) == NONE) return;
    for (uint c = gl_SubgroupID; c < FN; c += SUBGROUPS) {
        const float factor = find_factor(row_of(group * FN + c));
        if (lane == 0u) factors[c] = factor;
    }
    barrier();
    for (uint base = gl_WorkGroupID.z * SUBGROUPS * STAGE_K; base < end; base += gl_NumWorkGroups.z * SUBGROUPS * STAGE_K) {
        const uint first = base + gl_SubgroupID * STAGE_K;
        [[unroll]] for (uint i = 0; i < FN * STAGE_K / 4; i += SG) {
            const uint c = (i + lane) / (STAGE_K / 4), quad = (i + lane) % (STAGE_K / 4);
            const uvec2 four = pack_quad(row_of(group * FN + c), first / 4u + quad, factors[c]);
            rows[stage + c * PITCH + quad / 2u][2u * (quad & 1u)] = four.x;
            rows[stage + c * PITCH + quad / 2u][2u * (quad & 1u) + 1u] = four.y;
        }
        subgroup_sync();
        [[unroll]] for (uint k = 0; k < STAGE_K; k += FK) {
            if (first + k < end) {
                MATRIX_B b;
                coopMatLoad(b, rows, stage + k / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                y4[group * p.y_stride + (first + k) / FK * SG + lane] = to_fragment(b);
            }
        }
        subgroup_sync();
    }
    report_overflow();
}
#else
void main() {
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint column = group * (WG / SG) + gl_SubgroupID, row = row_of(column);
    if (row == NONE) return;
    const float factor = find_factor(row);
    for (uint quad = gl_SubgroupInvocationID; quad < 2u * p.y_stride; quad += SG)
        y2[column * 2u * p.y_stride + quad] = pack_quad(row, quad, factor);
    report_overflow();
}
#endif

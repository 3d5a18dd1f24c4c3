// RMS_NORM_PAIR: two normed rows side by side, y[t] = [norm(a[t]) * wa, norm(b[t]) * wb], where b[t] is row ids[t] of a table.
//
//   binding 0  a F32 [n, dim]; with EMBEDS the embedding [embed_rows, dim] in planes: a[t] is row tokens[t] of it, times embed_scale
//   binding 1  wa F32 [dim]
//   binding 2  table F32 [table_rows, dim]
//   binding 3  wb F32 [dim]
//   binding 4  ids I32 [n]; with PREVIOUS positions, and an id is the position before (copy/previous.comp)
//   binding 5  y [n, 2 * dim] F32, Q8_1 (OUT 1), or F16 in unit order (OUT 2, gemm/units.glsl; columns past n are not written)
//   BIND_TOKENS  I32 [n] (EMBEDS)
//   BIND_ROW     F32 [n, dim]: b[t] (ROW 1), or its half of y (ROW 2)
//   OVERFLOW_BINDING  the overflow word of y (OUT 2; gemm/overflow.glsl)
//
// An id or a token outside its table gives zeros. A workgroup takes a half of a row: thread t has quads (4 values) t, t + WG_SIZE, ..., in
// registers. dim is whole units of 32. Every workgroup waits for something of a, and for all of table, ids and tokens.
//
// The including shader declares the push constants `p`, and with EMBEDS a decoder.
//
// Defines: ROUNDS (quads of a thread) OUT ROW EMBEDS PREVIOUS, those of common/reduce.glsl, with EMBEDS UNITS (of a row), and with OUT 2 SG FN FK
// ROW_LANES (of gemm/units.glsl)
#extension GL_EXT_control_flow_attributes : require
#if OUT == 2
#extension GL_EXT_shader_16bit_storage : require
#endif
#define REDUCE_GROUPS (OUT == 1)
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

#include "common/sentinel.glsl"
#include "common/arrivals.glsl"

#if EMBEDS
layout(std430, set = 0, binding = BIND_TOKENS) readonly buffer InTokens { int tokens[]; };

#define UNIT_STRIDE (UNITS + 1)
shared vec4 embedded[8 * UNIT_STRIDE];  // quad j of unit u is embedded[j * UNIT_STRIDE + u]

void decode(uint token) {
    for (uint unit = gl_LocalInvocationID.x; unit < UNITS; unit += WG_SIZE) {
        vec4 v[8];
        if (token < p.embed_rows) unit_decode(unit_load(place(token, unit)), v);
        else
            [[unroll]] for (uint j = 0; j < 8; j++) v[j] = vec4(0.0);
        [[unroll]] for (uint j = 0; j < 8; j++) embedded[j * UNIT_STRIDE + unit] = p.embed_scale * v[j];
    }
    barrier();
}
#else
layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InA { vec4 a4[]; };
#endif
layout(std430, set = 0, binding = 1) readonly buffer InWa { vec4 wa4[]; };
layout(std430, set = 0, binding = 2) readonly buffer Table { vec4 table4[]; };
layout(std430, set = 0, binding = 3) readonly buffer InWb { vec4 wb4[]; };
layout(std430, set = 0, binding = 4) readonly buffer InIds { int ids[]; };
#if OUT == 0
layout(std430, set = 0, binding = 5) writeonly buffer OutY { vec4 y4[]; };
#elif OUT == 1
layout(std430, set = 0, binding = 5) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#else
layout(std430, set = 0, binding = 5) writeonly buffer Units { uvec2 units2[]; };
layout(std430, set = 0, binding = 5) writeonly buffer UnitHalves { uint16_t unit_halves[]; };
#include "gemm/overflow.glsl"
#include "gemm/pack.glsl"
#include "gemm/units.glsl"

void store_units(uint column, uint quad, vec4 v) {
    const uvec2 packed = pack_four(track_overflow(v));
    if (LANE_VALUES >= 4) units2[unit_place(column, 4u * quad, p.y_stride) / 4u] = packed;
    else
        [[unroll]] for (uint i = 0; i < 4; i++)
            unit_halves[unit_place(column, 4u * quad + i, p.y_stride)] = uint16_t(packed[i / 2] >> (16u * (i % 2)));
}
#endif
#if ROW
layout(std430, set = 0, binding = BIND_ROW) writeonly buffer OutRow { vec4 row4[]; };
#endif

void main() {
    const uint index = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x, row = index >> 1, t = gl_LocalInvocationID.x;
    const bool second = (index & 1u) != 0u;
    if (row >= p.n) return;
    vec4 weight[ROUNDS], v[ROUNDS];  // the weight is read before the waits
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
        const uint quad = min(i * WG_SIZE + t, p.quads - 1u);
        if (second) weight[i] = wb4[quad];
        else weight[i] = wa4[quad];
    }
#if EMBEDS && defined(UNIT_TABLE)
    unit_table(t, WG_SIZE);
    barrier();
#endif
    const uint zero = wait_for_arrivals();
    if (second) {
#if PREVIOUS
        const uint id = uint(max(ids[row + zero], 0) - 1);
#else
        const uint id = uint(ids[row + zero]);
#endif
        // As an unsigned number, a negative id is beyond every table.
        [[unroll]] for (uint i = 0; i < ROUNDS; i++)
            v[i] = id < p.table_rows ? table4[id * p.quads + min(i * WG_SIZE + t, p.quads - 1u) + zero] : vec4(0.0);
#if SPINS_ON_PARTS
        float word;
        SPIN_UNTIL(word = a4[row * p.quads].x, arrived(word));
#endif
    } else {
#if EMBEDS
        decode(uint(tokens[row + zero]));
#endif
        [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
            const uint within = min(i * WG_SIZE + t, p.quads - 1u), quad = row * p.quads + within;
#if EMBEDS
            v[i] = embedded[within % 8u * UNIT_STRIDE + within / 8u];
#elif SPINS_ON_PARTS
            SPIN_UNTIL(v[i] = a4[quad], arrived(v[i]));
#else
            v[i] = a4[quad + zero];
#endif
        }
    }
    float square = 0.0;
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
        if (i * WG_SIZE + t >= p.quads) v[i] = vec4(0.0);
        square += dot(v[i], v[i]);
    }
    const float factor = 1.0 / sqrt(wg_sum(square) / float(4u * p.quads) + (second ? p.eps_b : p.eps_a));
    const uint first = second ? p.quads : 0u;
#if OUT == 1
    Q8_1Quad packed[ROUNDS];
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) packed[i] = q8_1_pack(first + i * WG_SIZE + t, v[i] * factor * weight[i]);
#endif
    [[unroll]] for (uint i = 0; i < ROUNDS; i++) {
        const uint quad = i * WG_SIZE + t;
        if (quad >= p.quads) break;
        const vec4 normed = v[i] * factor * weight[i];
#if OUT == 0
        y4[row * p.y_quads + first + quad] = not_sentinel(normed);
#elif OUT == 1
        q8_1_store(row, p.y_quads / 8u, first + quad, packed[i]);
#else
        store_units(row, first + quad, p.scale * normed);
#endif
#if ROW == 1
        if (second) row4[row * p.quads + quad] = not_sentinel(v[i]);
#elif ROW == 2
        if (second) row4[row * p.quads + quad] = not_sentinel(normed);
#endif
    }
#if OUT == 2
    if (second)
        for (uint quad = 2u * p.quads + t; quad < p.y_quads; quad += WG_SIZE) store_units(row, quad, vec4(0.0));
    report_overflow();
#endif
    arrive();
}

#version 450
// Norm, router and choice of experts of few tokens in one dispatch: RMS norm of each row of x; the normed row packed for products in registers
// (gemm/coop_reg.glsl); the router's logits of it; the experts of each token and their weights (TOPK_MOE); the route of the products by
// these experts (gemm/route.glsl).
//
//   binding 0   x F32 [n, K]
//   binding 1   norm weight F32 [K]
//   binding 2   the router's weight F32 [N_EXPERT, K], in planes (quant/f32.glsl)
//   binding 3   units: the normed rows, F16 in unit order (gemm/units.glsl)
//   bindings 4, 5  weights F32 [n, USED], ids I32 [n, USED]
//   binding 6   the route
//   binding 7   scratch F32 [n, N_EXPERT]: logits
//   binding 8   tickets [n + 1] (common/ticket.glsl)
//   binding 9   overflow word of the units (gemm/overflow.glsl)
//   BIND_BIAS, BIND_SELECTION_BIAS  F32 [N_EXPERT]: added to the logits (HAS_BIAS), to what experts are ordered by (SELECT_BIAS)
//
// Workgroup (x, y) takes token y, experts x * EXPERTS_EACH .. and a share of the packing. LANES threads together read an expert's row, unit by
// unit; the first units are loaded before the wait for x. Each token's last workgroup chooses its experts, and the last one of all makes the route.
// Nobody waits for another workgroup; only the last one counts as arrived, after all others.
//
// Defines: WG_SIZE LANES EXPERTS_EACH K X_QUADS (vec4 of a row as it is packed) Y_STRIDE SG FN FK ROW_LANES (of gemm/units.glsl) TILE_N
// EXPERTS HAS_BIAS, those of topk/choose.glsl and common/reduce.glsl
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint part;   // vec4 of the router's weight in a part of its planes
    uint tiles;  // of the route: room for so many
    float eps;
    float scale;   // factor of the experts' weights
    float units_scale;  // of the units, which keeps them within 65504
} p;

layout(std430, binding = 0) readonly buffer X { vec4 x4[]; };
layout(std430, binding = 1) readonly buffer NormWeight { vec4 norm_weight4[]; };
layout(std430, binding = 2) readonly buffer Router { vec4 router4[]; };
layout(std430, binding = 3) writeonly buffer Units { uvec2 units2[]; };
layout(std430, binding = 3) writeonly buffer UnitHalves { uint16_t unit_halves[]; };
layout(std430, binding = 4) writeonly buffer Weights { float chosen_weights[]; };
layout(std430, binding = 5) coherent buffer Ids { int chosen_ids[]; };
layout(std430, binding = 6) writeonly buffer Route { uint route[]; };
layout(std430, binding = 7) coherent buffer Logits { float logits[]; };
layout(std430, binding = 8) coherent buffer Tickets { uint tickets[]; };
#if HAS_BIAS
layout(std430, binding = BIND_BIAS) readonly buffer Bias { float bias[]; };
#endif
#if SELECT_BIAS
layout(std430, binding = BIND_SELECTION_BIAS) readonly buffer SelectionBias { float selection_bias[]; };
#define SELECTION_BIAS(e) selection_bias[e]
#endif
#define OVERFLOW_BINDING 9
#include "gemm/overflow.glsl"
#include "gemm/pack.glsl"
#include "gemm/units.glsl"
#include "common/sentinel.glsl"
#include "common/arrivals.glsl"
#include "common/ticket.glsl"
#define ROUTE_THREADS WG_SIZE
#define ROUTE_ID(slot) chosen_ids[slot]
#include "gemm/route.glsl"
#define LOGIT(token, e) logits[(token) * N_EXPERT + (e)]
#include "topk/choose.glsl"

#define K_QUADS (K / 4)
#define K_UNITS (K / 32)
#define UNIT_ROUNDS ((K_UNITS + LANES - 1) / LANES)
#define ROW_GROUPS_OF_THREADS (WG_SIZE / LANES)
#define EXPERT_ROUNDS ((EXPERTS_EACH + ROW_GROUPS_OF_THREADS - 1) / ROW_GROUPS_OF_THREADS)
#define AHEAD_ROUNDS (UNIT_ROUNDS < 3 ? UNIT_ROUNDS : 3)

shared vec4 row[8 * K_UNITS];  // x times the norm weight: part p of unit u, as the planes have it, is row[p * K_UNITS + u]

vec4 ahead[AHEAD_ROUNDS * 8];

uint first_expert() { return gl_WorkGroupID.x * EXPERTS_EACH + gl_LocalInvocationID.x / LANES; }

// Part p of unit number `unit` of an expert's row; past either end the last one.
vec4 router_quad(uint expert, uint unit, uint part) {
    return router4[part * p.part + min(expert, N_EXPERT - 1u) * K_UNITS + min(unit, K_UNITS - 1u)];
}

void load_ahead() {
    [[unroll]] for (uint j = 0; j < AHEAD_ROUNDS; j++)
        [[unroll]] for (uint i = 0; i < 8; i++) ahead[j * 8 + i] = router_quad(first_expert(), j * LANES + gl_LocalInvocationID.x % LANES, i);
}

// The sums of a part of the experts.
void find_logits(uint token, float factor) {
    const uint lane = gl_LocalInvocationID.x % LANES;
    [[unroll]] for (uint r = 0; r < EXPERT_ROUNDS; r++) {
        const uint expert = first_expert() + r * ROW_GROUPS_OF_THREADS;
        float sum = 0.0;
        [[unroll]] for (uint j = 0; j < UNIT_ROUNDS; j++) {
            const uint unit = j * LANES + lane;
            vec4 w[8];
            [[unroll]] for (uint i = 0; i < 8; i++) w[i] = r == 0 && j < AHEAD_ROUNDS ? ahead[j * 8 + i] : router_quad(expert, unit, i);
            if (unit < K_UNITS)
                [[unroll]] for (uint i = 0; i < 8; i++) sum += dot(w[i], row[i * K_UNITS + unit]);
        }
        sum = factor * group_sum(sum, LANES);
        const uint within = expert - gl_WorkGroupID.x * EXPERTS_EACH;
        if (lane != 0u || within >= EXPERTS_EACH || expert >= N_EXPERT) continue;
#if HAS_BIAS
        sum += bias[expert];
#endif
        logits[token * N_EXPERT + expert] = sum;
    }
}

// This workgroup's share of the normed row, in unit order.
void pack_share(uint token, float factor) {
    for (uint quad = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x; quad < X_QUADS; quad += gl_NumWorkGroups.x * WG_SIZE) {
        const vec4 v = quad < K_QUADS ? factor * row[quad % 8u * K_UNITS + quad / 8u] : vec4(0.0);
        const uvec2 packed = pack_four(track_overflow(v));
        if (LANE_VALUES >= 4) units2[unit_place(token, 4u * quad, Y_STRIDE) / 4u] = packed;
        else
            [[unroll]] for (uint i = 0; i < 4; i++) unit_halves[unit_place(token, 4u * quad + i, Y_STRIDE)] = uint16_t(packed[i / 2] >> (16u * (i % 2)));
    }
}

void main() {
    const uint tid = gl_LocalInvocationID.x, token = gl_WorkGroupID.y;
    load_ahead();
    const uint zero = wait_for_arrivals();
    float square = 0.0;
    for (uint quad = tid; quad < K_QUADS; quad += WG_SIZE) {
        const vec4 v = x4[token * K_QUADS + quad + zero];
        square += dot(v, v);
        row[quad % 8u * K_UNITS + quad / 8u] = v * norm_weight4[quad];
    }
    const float factor = inversesqrt(wg_sum(square) / float(K) + p.eps);
    barrier();
    find_logits(token, factor);
    pack_share(token, p.units_scale * factor);
    report_overflow();
    if (!last_to_arrive(token, gl_NumWorkGroups.x)) return;
    fetch_logits(tid, token);
    choose_experts(tid);
    store_chosen(tid, token, p.scale);
    if (!last_to_arrive(p.n, p.n)) return;
    make_route(tid, p.n * USED, p.tiles);
    arrive();
}

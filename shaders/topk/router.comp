#version 450
// TOPK_MOE: the experts of each token and their weights. The USED largest logits are chosen, of equals the lower id first;
// weights are the gate's function of them.
//
//   binding 0  logits   F32 [n, N_EXPERT]
//   binding 1  weights  F32 [n, USED]
//   binding 2  ids      I32 [n, USED], largest logit first
//   binding 3  bias     F32 [N_EXPERT] (SELECT_BIAS): added to the values by which experts are ordered
//
// One workgroup per token. It runs alone between two stages, so what counts is its latency. With BIND_ROUTE the last one to finish also makes the
// route of the products by these experts, which saves a stage:
//   binding BIND_ROUTE      the route (gemm/route.glsl)
//   binding BIND_ROUTE + 1  counter of workgroups (common/ticket.glsl)
//
// Defines: those of topk/choose.glsl and common/reduce.glsl; with BIND_ROUTE EXPERTS and TILE_N

#extension GL_EXT_control_flow_attributes : require
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    float scale;
#ifdef BIND_ROUTE
    uint tiles;  // of the route: room for so many
#endif
} p;

layout(binding = 0) readonly buffer Logits { float logits[]; };
layout(binding = 1) writeonly buffer Weights { float chosen_weights[]; };
#ifdef BIND_ROUTE
layout(binding = 2) coherent buffer Ids { int chosen_ids[]; };
layout(binding = BIND_ROUTE) writeonly buffer Route { uint route[]; };
layout(binding = BIND_ROUTE + 1) coherent buffer Tickets { uint tickets[]; };
#define ROUTE_THREADS WG_SIZE
#define ROUTE_ID(slot) chosen_ids[slot]
#include "common/ticket.glsl"
#include "gemm/route.glsl"
#else
layout(binding = 2) writeonly buffer Ids { int chosen_ids[]; };
#endif

#if SELECT_BIAS
layout(binding = 3) readonly buffer Bias { float selection_bias[]; };
#define SELECTION_BIAS(e) selection_bias[e]
#endif

#define LOGIT(token, e) logits[(token) * N_EXPERT + (e)]
#include "topk/choose.glsl"

void main() {
    const uint token = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (token >= p.n) return;
    fetch_logits(gl_LocalInvocationID.x, token);
    choose_experts(gl_LocalInvocationID.x);
    store_chosen(gl_LocalInvocationID.x, token, p.scale);
#ifdef BIND_ROUTE
    if (last_to_arrive(0u, p.n)) make_route(gl_LocalInvocationID.x, p.n * USED, p.tiles);
#endif
}

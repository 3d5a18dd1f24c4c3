#version 450
// The route of a grouped product (gemm/route.glsl), by one workgroup.
//
//   binding 0  ids I32 [slots]: the expert of each slot
//   binding 1  the route
//
// Defines: WG, EXPERTS, TILE_N
layout(local_size_x = WG) in;

layout(push_constant) uniform Push {
    uint slots;
    uint tiles;   // room for so many
} p;

layout(std430, set = 0, binding = 0) readonly buffer Ids { int ids[]; };
layout(std430, set = 0, binding = 1) writeonly buffer Route { uint route[]; };

#define ROUTE_THREADS WG
#define ROUTE_ID(slot) ids[slot]
#include "gemm/route.glsl"

void main() {
    make_route(gl_LocalInvocationID.x, p.slots, p.tiles);
}

#version 450
// SET_ROWS into a quantized KV cache: quantizes rows of heads to Q8_0 or Q4_0, in the device layout of docs/weight_layout.md.
//
//   binding 0  cache [heads, n_ctx, head_dim], TYPE_Q8_0 or TYPE_Q4_0
//   binding 1  x F32 [tokens, heads, head_dim], read as vec4
//   binding 2  pos I32 [tokens]; a position outside 0 .. n_ctx - 1 stores nothing
//
// One thread per unit (32 neighbouring values of a head).
//
//   SCALE_WORDS  1: the device cannot store single 16-bit values. Two units have their scales in one word;
//                each thread clears and sets its own half by atomics
#if !SCALE_WORDS
#extension GL_EXT_shader_16bit_storage : require
#endif
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint units;     // units of a row
    uint part;      // 16-byte words from the first part of the quants to the second
    uint scales;    // 16-byte words from the beginning to the scales
    uint tokens;
    uint heads;
    uint n_ctx;
} p;

layout(std430, set = 0, binding = 0) writeonly buffer CacheQuads { uvec4 quads[]; };
#if SCALE_WORDS
layout(std430, set = 0, binding = 0) buffer CacheWords { uint words[]; };
#else
layout(std430, set = 0, binding = 0) writeonly buffer CacheHalves { uint16_t halves[]; };
#endif
layout(std430, set = 0, binding = 1) readonly buffer InX { vec4 x[]; };
layout(std430, set = 0, binding = 2) readonly buffer InPos { int pos[]; };

#include "cache/f16_bits.glsl"
#include "encode/unit_bytes.glsl"

void store_scale(uint unit, float d) {
    const uint bits = f16_bits(d);
#if SCALE_WORDS
    const uint word = 4u * p.scales + (unit >> 1), shift = 16u * (unit & 1u);
    atomicAnd(words[word], ~(0xffffu << shift));
    atomicOr(words[word], bits << shift);
#else
    halves[8u * p.scales + unit] = uint16_t(bits);
#endif
}

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row = i / p.units, unit = i - row * p.units;
    const uint token = row / p.heads, head = row - token * p.heads;
    if (token >= p.tokens) return;
    const int at = pos[token];
    if (at < 0 || uint(at) >= p.n_ctx) return;
    vec4 v[8];
    [[unroll]] for (uint j = 0; j < 8; j++) v[j] = x[8 * i + j];
    const uint to = (head * p.n_ctx + uint(at)) * p.units + unit;
#if defined(TYPE_Q8_0)
    const float d = unit_scale(v, CACHE_Q8_0), inverse = reciprocal(d);
    uvec4 quants[2];
    [[unroll]] for (uint j = 0; j < 8; j++) quants[j / 4][j % 4] = q8_0_word(v[j], inverse);
    quads[to] = quants[0];
    quads[p.part + to] = quants[1];
#else
    const float d = unit_scale(v, CACHE_Q4_0), inverse = reciprocal(d);
    uvec4 quants;
    [[unroll]] for (uint j = 0; j < 4; j++) quants[j] = q4_0_word(v[j], v[j + 4], inverse);
    quads[to] = quants;
#endif
    store_scale(to, d);
}

// Weights in the device layout of docs/architecture.md: planes of one tensor (or shard), bound at binding 0.
//
// A unit is 32 consecutive weights of a row; `units` of them make a row. Part 0 of the quants begins at byte 0, further parts follow
// every `part` 16-byte words, the other planes begin at `plane[i]` 16-byte words.
//
// The including shader has a push-constant block named `p` with a member `Weights w`, and includes quant/place.glsl and quant/<type>.glsl
// after it:
//   UnitRaw unit_load(Place at)                             reads, decodes nothing
//   void unit_decode(UnitRaw r, out vec4 w[8])              32 weights in order
// where UNIT_TABLE is defined, all threads of the workgroup call first, and pass a barrier before they decode:
//   void unit_table(uint thread, uint threads)              brings a code book into shared memory
// and, where UNIT_INTS is 1 (weight = scale[half] * int8 - bias[half], half = 16 weights):
//   void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias)
//   UNIT_HALVES  1: the halves have scales of their own; 0: scale.x and bias.x hold for all 32
//   UNIT_BIAS    0: bias is zero
//   UNIT_SIGNED  1: the bytes of q are signed
// and, where UNIT_DOT is defined, the product with 32 int8 x, whose halves add up to `sum`, in fewer steps than by way of unit_ints; times
// UNIT_DOT it is that of the weights. What does not depend on x comes first, in UNIT_WORDS words of bytes:
//   void unit_words(UnitRaw r, out uint q[UNIT_WORDS])
//   float unit_dot(UnitRaw r, uint q[UNIT_WORDS], uint x[8], ivec2 sum)

#extension GL_EXT_control_flow_attributes : require

struct Weights {
    uint units;
    uint part;
    uint plane[4];
};

layout(std430, set = 0, binding = 0) readonly buffer WeightWords { uint w1[]; };
layout(std430, set = 0, binding = 0) readonly buffer WeightPairs { uvec2 w2[]; };
layout(std430, set = 0, binding = 0) readonly buffer WeightQuads { uvec4 w4[]; };

float half_of(uint word, uint index) {
    return unpackHalf2x16(word >> (16u * (index & 1u))).x;
}

uint byte_of(uint word, uint index) {
    return (word >> (8u * (index & 3u))) & 0xffu;
}

// Weights in the device layout of docs/weight_layout.md: the planes of one tensor (or shard), bound at binding 0.
//
// A unit is 32 consecutive weights of a row; a row has `units` of them. Blocks of the GGUF file are taken apart at load: each field of a block
// (quants, high bits, scales) gets a plane of its own, so that neighbouring lanes read neighbouring memory. The quants begin at byte 0; where a
// unit has more than 16 bytes of them, its next 16 bytes lie in the next part, `part` 16-byte words further on.
// Other planes begin at 16-byte word plane[i].
//
// The including shader has a push-constant block `p` with a member `Weights w`. After this file it includes quant/place.glsl and
// quant/<type>.glsl, which brings the decoder of the type:
//   UnitRaw unit_load(Place at)                  loads the bits of a unit and decodes nothing, so that many loads can be in flight
//   void unit_decode(UnitRaw r, out vec4 w[8])   its 32 weights, in order
// UNIT_INTS 1: the weights are scale[half] * int8 - bias[half], where a half is 16 weights. Then there is also
//   void unit_ints(UnitRaw r, out uint q[8], out vec2 scale, out vec2 bias)   the 32 int8, four to a word, with their scales and biases
//   UNIT_HALVES  1: the halves differ in scale and bias; 0: scale.x and bias.x hold for all 32
//   UNIT_BIAS    0: bias is zero
//   UNIT_SIGNED  1: the bytes of q are signed
// UNIT_DOT defined: the type has a dot product with 32 int8 x that is shorter than the way through unit_ints. Its result times UNIT_DOT is the
// dot product of the weights with x. unit_words does the part that is the same for every x; `sum` holds the sums of the halves of x:
//   void unit_words(UnitRaw r, out uint q[UNIT_WORDS])
//   float unit_dot(UnitRaw r, uint q[UNIT_WORDS], uint x[8], ivec2 sum)
// UNIT_TABLE defined: the decoder needs a table in shared memory. All threads of the workgroup call this first, then pass a barrier:
//   void unit_table(uint thread, uint threads)
//
// The header of each type lists its planes with their bytes per unit (or per 256 weights, where it says so).

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

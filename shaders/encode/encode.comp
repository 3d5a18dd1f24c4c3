#version 450
// Encodes rows of floats as rows of a quantized tensor in the device layout (docs/weight_layout.md).
//
//   binding 0  x F32 [n3, n2, n1, k]
//   binding 1  y: row (i3, i2, i1) of x becomes row i1 * step[0] + i2 * step[1] + i3 * step[2] of the tensor
//   binding 2  ids I32 or I64 [id_size[2], id_size[1], id_size[0]], repeated over n2 and n3: they replace i1;
//              an id outside 0 .. limit - 1 stores nothing. Not read if id_words is 0
//
// For types in units of 32 values (WHOLE_GROUP 0) one thread encodes a unit; for the others one workgroup encodes a block of up to 256. Two
// blocks may share a word of a plane of small items, so such items are stored by atomics.
//
// Defines: WHOLE_GROUP; BLOCK, values of a unit or block; TYPE_<NAME>; ENCODE_FILE, which has void encode(uint block), where block is the
// number of the unit or block in the tensor and v[] its values
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint units;       // as in quant/weights.glsl
    uint part;
    uint plane[4];
    uint k;
    uint rows;
    uint n1;
    uint n2;
    uint step[3];
    uint id_size[3];
    uint id_words;    // 32-bit words of an id: 1 or 2; 0: there are none
    uint limit;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) buffer OutY { uint y[]; };
layout(std430, set = 0, binding = 2) readonly buffer InIds { uint ids[]; };

// Stores item `at`, of `bits` bits, of the plane that begins `first` 16-byte words into the tensor.
void put(uint first, uint at, uint bits, uint value) {
    const uint per = 32u / bits, word = 4u * first + at / per;
    const int from = int(bits * (at % per));
    atomicAnd(y[word], ~bitfieldInsert(0u, ~0u, from, int(bits)));
    atomicOr(y[word], bitfieldInsert(0u, value, from, int(bits)));
}
void put_word(uint first, uint at, uint value) { y[4u * first + at] = value; }
uint half_bits(float v) { return packHalf2x16(vec2(clamp(v, -65504.0, 65504.0), 0.0)) & 0xffffu; }
float as_half(float v) { return unpackHalf2x16(half_bits(v)).x; }
#include "encode/unit_bytes.glsl"

#if WHOLE_GROUP
shared float v[BLOCK];
#else
float v[BLOCK];
#endif
#include ENCODE_FILE

void main() {
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint i = WHOLE_GROUP == 1 ? group : group * WG_SIZE + gl_LocalInvocationID.x;
    const uint blocks = p.k / BLOCK;
    const uint row = i / blocks;
    if (row >= p.rows) return;
    uint i1 = row % p.n1;
    const uint i2 = row / p.n1 % p.n2, i3 = row / (p.n1 * p.n2);
    if (p.id_words != 0u) {
        const uint at = ((i3 % p.id_size[2]) * p.id_size[1] + i2 % p.id_size[1]) * p.id_size[0] + i1;
        i1 = ids[at * p.id_words];
        if (i1 >= p.limit || (p.id_words == 2u && ids[at * 2u + 1u] != 0u)) return;
    }
#if WHOLE_GROUP
    for (uint j = gl_LocalInvocationID.x; j < BLOCK; j += WG_SIZE) v[j] = x[i * BLOCK + j];
    barrier();
#else
    for (uint j = 0u; j < BLOCK; j++) v[j] = x[i * BLOCK + j];
#endif
    encode((i1 * p.step[0] + i2 * p.step[1] + i3 * p.step[2]) * blocks + i % blocks);
}

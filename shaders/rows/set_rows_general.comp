#version 450
// SET_ROWS into a tensor of any float type.
//
//   binding 0  x F32 [n3, n2, rows, k]
//   binding 1  ids I32 or I64 [id_size[2], id_size[1], id_size[0]], repeated over n2 and n3
//   binding 2  y F32 (kind 0), F16 (1) or BF16 (2) [n3, n2, limit, k]: row i of x goes to row ids[i3, i2, i];
//              an id outside 0 .. limit - 1 stores nothing
//
// One thread per value. A 16-bit value is half a word; it is written by atomics,
// since another thread may write the other half at the same time.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint k;
    uint rows;
    uint n2;
    uint limit;
    uint id_size[3];
    uint id_words;    // 32-bit words of an id
    uint kind;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) readonly buffer InIds { uint ids[]; };
layout(std430, set = 0, binding = 2) buffer OutY { uint y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const uint row = i / p.k, head = row / p.rows;
    const uint at = ((head / p.n2 % p.id_size[2]) * p.id_size[1] + head % p.n2 % p.id_size[1]) * p.id_size[0] + row % p.rows;
    const uint id = ids[at * p.id_words];
    if (id >= p.limit || (p.id_words == 2u && ids[2u * at + 1u] != 0u)) return;
    const uint to = (head * p.limit + id) * p.k + i % p.k;
    const uint bits = floatBitsToUint(x[i]);
    if (p.kind == 0u) {
        y[to] = bits;
        return;
    }
    uint half_word = packHalf2x16(vec2(x[i], 0.0)) & 0xffffu;
    if (p.kind == 2u) half_word = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    atomicAnd(y[to >> 1], (to & 1u) == 0u ? 0xffff0000u : 0x0000ffffu);
    atomicOr(y[to >> 1], half_word << (16u * (to & 1u)));
}

#version 450
// Repacks weights from the layout of a GGUF file to the planes of the device layout (docs/weight_layout.md). Bits are moved, some are flipped,
// and nibbles of some types are renamed; nothing is computed. One kernel serves all types: a table says where the bits of a type go
// (vkback/quants/word_moves.py derives it from the type's codec).
//
//   binding 0  file: blocks as in the file, in groups of `words` words; after the last block of a tensor, zeros up to a whole group
//   binding 1  moves: the table of the type:
//                words, planes, first limit, number of limits
//                a plane:         its words per group, where the entries of its words begin, names of the nibbles 0..7 and 8..15
//                a word's entry:  begin and end of its terms, bits to flip
//                a term:          word of the group | bits to rotate it left by << 16, then the mask of the bits that it contributes
//                a limit:         word of the group, mask, least, flag: raised if (word & mask) >= least
//   binding 2  planes: a tensor in the device layout
//   binding 3  flags: one word per dispatch, zero before: the limits that were reached
//
// A workgroup stages `tile` groups in shared memory, so that each word of the file is read once.
// Its threads then make the words of each plane, one word per thread, in order.

#define THREADS 128
#define SHARED_WORDS 2048
#define IDENTITY_MAP uvec2(0x76543210u, 0xfedcba98u)

layout(local_size_x = THREADS) in;

layout(push_constant) uniform Push {
    uint file_begin;   // word of the first group in binding 0
    uint groups;
    uint tile;         // groups per workgroup, at most SHARED_WORDS / words
    uint first;        // number of the first group in the tensor; with row_groups, in the tensor of the file
    uint row_groups;   // groups per row, if the file interleaves rows of several tensors; else 0
    uint row_step;     // rows in the target from one row of this tensor to the next
    uint row_first;    // row in the target of this tensor's row 0
    uint flag;         // word of binding 3
    uint plane_begin[9];  // word at which each plane begins, and where the last one ends
} p;

layout(std430, set = 0, binding = 0) readonly buffer InFile { uint file[]; };
layout(std430, set = 0, binding = 1) readonly buffer InMoves { uint moves[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutPlanes { uint planes[]; };
layout(std430, set = 0, binding = 3) buffer InOutFlags { uint flags[]; };

shared uint blocks[SHARED_WORDS];

uint rotate_left(uint word, uint bits) {
    return word << bits | word >> 1u >> (31u - bits);
}

uint map_nibbles(uint word, uvec2 nibble_map) {
    uint result = 0u;
    for (uint at = 0u; at < 32u; at += 4u) {
        const uint nibble = word >> at & 15u;
        result |= (nibble_map[nibble >> 3u] >> 4u * (nibble & 7u) & 15u) << at;
    }
    return result;
}

// Where a group goes in the tensor, in groups.
uint target_group(uint group) {
    if (p.row_groups == 0u) return group;
    return (group / p.row_groups * p.row_step + p.row_first) * p.row_groups + group % p.row_groups;
}

void main() {
    const uint words = moves[0];
    const uint first = gl_WorkGroupID.x * p.tile;
    const uint count = min(p.tile, p.groups - first);
    for (uint i = gl_LocalInvocationID.x; i < count * words; i += THREADS) blocks[i] = file[p.file_begin + first * words + i];
    barrier();

    for (uint plane = 0u; plane < moves[1]; plane++) {
        const uint head = 4u + 4u * plane;
        const uint length = moves[head];
        const uvec2 nibble_map = uvec2(moves[head + 2u], moves[head + 3u]);
        for (uint i = gl_LocalInvocationID.x; i < count * length; i += THREADS) {
            const uint group = i / length;
            const uint entry = moves[head + 1u] + 3u * (i % length);
            uint word = moves[entry + 2u];
            for (uint term = moves[entry]; term < moves[entry + 1u]; term += 2u) {
                const uint from = moves[term];
                uint source = blocks[group * words + (from & 0xffffu)];
                if (nibble_map != IDENTITY_MAP) source = map_nibbles(source, nibble_map);
                word ^= rotate_left(source, from >> 16u) & moves[term + 1u];
            }
            // The last group of a tensor may have fewer blocks; words of missing blocks would lie past the end of the plane.
            const uint to = p.plane_begin[plane] + target_group(p.first + first + group) * length + i % length;
            if (to < p.plane_begin[plane + 1u]) planes[to] = word;
        }
    }

    uint raised = 0u;
    for (uint limit = moves[2]; limit < moves[2] + 4u * moves[3]; limit += 4u) {
        for (uint group = gl_LocalInvocationID.x; group < count; group += THREADS) {
            if ((blocks[group * words + moves[limit]] & moves[limit + 1u]) >= moves[limit + 2u]) raised |= moves[limit + 3u];
        }
    }
    if (raised != 0u) atomicOr(flags[p.flag], raised);
}

#version 450
// Weights as they lie in a GGUF file become planes of the device layout (docs/architecture.md): of some types nibbles get other names, then bits
// go to other places, none is computed.
// One kernel for all types; a table says where the bits of a type go (vkback/quants/word_moves.py makes it out of the type's codec).
//
//   binding 0  file, blocks as in the file: groups of `words` words, zeros after the last block of a tensor up to a whole group
//   binding 1  moves, the table of the type:
//                words, planes, begin and number of limits
//                a plane:         its words per group, where the entries of its words begin, names of the nibbles 0..7 and 8..15
//                a word's entry:  begin and end of its terms, bits to flip
//                a term:          word of the group | bits to rotate it left by << 16, mask of the bits it then gives
//                a limit:         word of the group, mask, least, flag: raised where (word & mask) >= least
//   binding 2  planes, a tensor of the device layout
//   binding 3  flags, one word a dispatch, zero before: limits that were reached
//
// A workgroup takes `tile` groups through shared memory, so that each word of the file is read once; its threads then make the words of a
// plane in their order, a word each.

#define THREADS 128
#define SHARED_WORDS 2048
#define AS_THEY_ARE uvec2(0x76543210u, 0xfedcba98u)

layout(local_size_x = THREADS) in;

layout(push_constant) uniform Push {
    uint file_begin;   // word of the first group in binding 0
    uint groups;
    uint tile;         // groups of a workgroup, at most SHARED_WORDS / words
    uint first;        // number of the first group in the tensor; of rows in turn, in the tensor of the file
    uint row_groups;   // groups of a row where rows of several tensors lie in turn; else 0
    uint row_step;     // rows from one row of this tensor to its next
    uint row_first;    // row at which its row 0 lies
    uint flag;         // word of binding 3
    uint plane_begin[9];  // words at which planes begin, and where the last ends
} p;

layout(std430, set = 0, binding = 0) readonly buffer InFile { uint file[]; };
layout(std430, set = 0, binding = 1) readonly buffer InMoves { uint moves[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutPlanes { uint planes[]; };
layout(std430, set = 0, binding = 3) buffer InOutFlags { uint flags[]; };

shared uint blocks[SHARED_WORDS];

uint rotated_left(uint word, uint bits) {
    return word << bits | word >> 1u >> (31u - bits);
}

uint renamed(uint word, uvec2 names) {
    uint result = 0u;
    for (uint at = 0u; at < 32u; at += 4u) {
        const uint nibble = word >> at & 15u;
        result |= (names[nibble >> 3u] >> 4u * (nibble & 7u) & 15u) << at;
    }
    return result;
}

// Where a group lies in the tensor, in groups.
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
        const uvec2 names = uvec2(moves[head + 2u], moves[head + 3u]);
        for (uint i = gl_LocalInvocationID.x; i < count * length; i += THREADS) {
            const uint group = i / length;
            const uint entry = moves[head + 1u] + 3u * (i % length);
            uint word = moves[entry + 2u];
            for (uint term = moves[entry]; term < moves[entry + 1u]; term += 2u) {
                const uint from = moves[term];
                uint source = blocks[group * words + (from & 0xffffu)];
                if (names != AS_THEY_ARE) source = renamed(source, names);
                word ^= rotated_left(source, from >> 16u) & moves[term + 1u];
            }
            // Past a plane's end lie the blocks that the tensor's last group lacks.
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

// What the training kernels of attention for CPU drivers share. They use no shared memory.
//
// A workgroup is one subgroup of LANES threads. Each holds a row of its own (a query or a key of the head) in registers, and loads one of LANES
// rows of the other side, whose values the lanes then broadcast to each other by shuffles:
// on a CPU driver a shuffle costs one instruction, a load one per lane.
//
// Defines: LANES, HD and VD (values of a head: p.hd and p.vd)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#define BLOCK_ROWS LANES
#include "attention/train/train_rules.glsl"

layout(local_size_x = LANES) in;

#define HD4 ((HD + 3) / 4)
#define VD4 ((VD + 3) / 4)

// Loads a row of a tensor [tokens, heads, DIM] into vec4 TO[], with zeros after DIM.
// For a row outside the sequence it loads the sequence's last one, which no query sees.
#define LOAD_ROW(TO, BUFFER, SEQUENCE, ROW, HEADS, HEAD, DIM)                                                      \
    {                                                                                                              \
        const uint at = (((SEQUENCE) * p.n + min(ROW, p.n - 1u)) * (HEADS) + (HEAD)) * DIM;                        \
        [[unroll]] for (uint d = 0u; d < (DIM + 3) / 4; d++)                                                       \
            [[unroll]] for (uint c = 0u; c < 4u; c++) TO[d][c] = 4u * d + c < DIM ? BUFFER[at + 4u * d + c] : 0.0; \
    }

#define STORE_ROW(FROM, BUFFER, ROW, DIM)                                                         \
    [[unroll]] for (uint d = 0u; d < (DIM + 3) / 4; d++)                                          \
        [[unroll]] for (uint c = 0u; c < 4u; c++)                                                 \
            if (4u * d + c < DIM) BUFFER[(ROW) * DIM + 4u * d + c] = FROM[d][c];

// Dot product of this lane's own row with the row that lane I holds.
#define PRODUCT(RESULT, OWN, OTHER, COUNT, I)                                                                  \
    {                                                                                                          \
        vec4 sum = vec4(0.0);                                                                                  \
        [[unroll]] for (uint d = 0u; d < COUNT; d++) sum = fma(OWN[d], subgroupShuffle(OTHER[d], I), sum);     \
        RESULT = sum.x + sum.y + (sum.z + sum.w);                                                              \
    }

// SUMS += FACTOR * (the row that lane I holds).
#define ADD_ROW(SUMS, FACTOR, OTHER, COUNT, I) \
    [[unroll]] for (uint d = 0u; d < COUNT; d++) SUMS[d] = fma(vec4(FACTOR), subgroupShuffle(OTHER[d], I), SUMS[d]);

// The score of a dot product: scaled and soft-capped.
float score(float product) {
    const float s = product * p.scale;
    return p.softcap != 0.0 ? p.softcap * tanh_exact(s / p.softcap) : s;
}

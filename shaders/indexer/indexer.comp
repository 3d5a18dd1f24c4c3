#version 450
#extension GL_EXT_control_flow_attributes : require
// The lightning indexer of DeepSeek V3.2: how much each row of a cache matters to each token.
//
//   y[s, t, i] = sum over heads h of weight[s, t, h] * max(q[s, t, h] . k[s, i], 0) + mask[s, t, i]
//
//   binding 0  q F32 [streams, tokens, heads, dim]
//   binding 1  k F32 [streams, rows, dim]
//   binding 2  weights F32 [streams, tokens, heads]
//   binding 3  mask F16 [mask_streams, tokens, rows], repeated over streams
//   binding 4  y F32 [streams, tokens, rows]
//
// A thread takes ROWS rows of a token and HEADS heads at a time (register blocking).
// Past the last row or head it reads that one again and drops the result.
const uint ROWS = 4u, HEADS = 8u;

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint all_tokens;    // of all streams
    uint tokens;
    uint rows;
    uint heads;
    uint dim;
    uint mask_streams;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InWeights { float weights[]; };
layout(std430, set = 0, binding = 3) readonly buffer InMask { uint mask[]; };
layout(std430, set = 0, binding = 4) writeonly buffer OutY { float y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint row_blocks = (p.rows + ROWS - 1u) / ROWS;
    const uint token = i / row_blocks, stream = token / p.tokens, first = i % row_blocks * ROWS;
    if (token >= p.all_tokens) return;
    uint from[ROWS];
    float sums[ROWS];
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        from[r] = (stream * p.rows + min(first + r, p.rows - 1u)) * p.dim;
        sums[r] = 0.0;
    }
    for (uint h = 0u; h < p.heads; h += HEADS) {
        uint head[HEADS];
        float dots[HEADS][ROWS];
        [[unroll]] for (uint j = 0u; j < HEADS; j++) {
            head[j] = (token * p.heads + min(h + j, p.heads - 1u)) * p.dim;
            [[unroll]] for (uint r = 0u; r < ROWS; r++) dots[j][r] = 0.0;
        }
        for (uint d = 0u; d < p.dim; d++) {
            float row[ROWS];
            [[unroll]] for (uint r = 0u; r < ROWS; r++) row[r] = k[from[r] + d];
            [[unroll]] for (uint j = 0u; j < HEADS; j++) {
                const float value = q[head[j] + d];
                [[unroll]] for (uint r = 0u; r < ROWS; r++) dots[j][r] += value * row[r];
            }
        }
        [[unroll]] for (uint j = 0u; j < HEADS; j++) {
            if (h + j >= p.heads) break;
            [[unroll]] for (uint r = 0u; r < ROWS; r++) sums[r] += weights[token * p.heads + h + j] * max(dots[j][r], 0.0);
        }
    }
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        if (first + r >= p.rows) break;
        const uint at = ((stream % p.mask_streams) * p.tokens + token % p.tokens) * p.rows + first + r;
        y[token * p.rows + first + r] = sums[r] + unpackHalf2x16(mask[at >> 1] >> (16u * (at & 1u))).x;
    }
}

#version 450
#extension GL_EXT_control_flow_attributes : require
// Attention with everything that FLASH_ATTN_EXT allows: heads of any size, V of another size than K, several sequences, a mask tensor, ALiBi,
// softcap, sinks. Slower than attention.comp and prompt.comp, which serve models.
//
//   y[s, t, h] = sum over i of softmax_i(cap(scale * q . k_i) + slope_h * mask[s, h, t, i]) * v_i
//
//   binding 0  q F32 [sequences, heads, tokens, k_dim]
//   binding 1  k F32; row i of kv head h of sequence s begins at k_offset + s * k_step[0] + h * k_step[1] + i * k_step[2]
//   binding 2  v F32, likewise
//   binding 3  mask F16 [mask_size[0], mask_size[1], tokens or more, kv], repeated over sequences and heads; not read if has_mask is 0
//   binding 4  sinks F32 [heads]; not read if has_sinks is 0
//   binding 5  y F32 [sequences, tokens, heads, v_dim]
//
// A workgroup takes up to QUERIES queries (token, head) of one kv head. It walks the rows in chunks of WG_SIZE with online softmax: first each
// thread makes the scores of one row, then it sums columns of V over the chunk. A query whose rows are all masked gives zeros.
//
// Defines: QUERIES; MAX_DIM, the upper bound of k_dim and v_dim; those of common/reduce.glsl
#include "common/reduce.glsl"
#include "elementwise/functions.glsl"
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint tokens;
    uint heads;
    uint kv_heads;
    uint kv;
    uint k_dim;
    uint v_dim;
    uint k_offset;
    uint v_offset;
    uint k_step[3];
    uint v_step[3];
    uint mask_size[3];    // sequences, heads, tokens
    uint has_mask;
    uint has_sinks;
    float scale;          // of the scores; already divided by softcap, if there is one
    float softcap;        // 0: none
    float max_bias;       // 0: no ALiBi, slopes are 1
} p;

layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 3) readonly buffer InMask { uint mask[]; };
layout(std430, set = 0, binding = 4) readonly buffer InSinks { float sinks[]; };
layout(std430, set = 0, binding = 5) writeonly buffer OutY { float y[]; };

shared float query[QUERIES][MAX_DIM];
shared float sums[QUERIES][MAX_DIM];
shared float weights[QUERIES][WG_SIZE];

const uint STEPS = 8u;    // unrolled by 8: llvmpipe ends an invocation's loops after 65535 passes in all

#define LOWEST uintBitsToFloat(0xff800000u)    // -inf

// ALiBi slopes. With n the largest power of two <= heads: 2^(-max_bias / n * (h + 1)) for h < n;
// the others take the odd powers of the root of 2^(-max_bias / n).
float slope_of(uint head) {
    if (p.max_bias == 0.0) return 1.0;
    const uint n = 1u << findMSB(p.heads);
    return head < n ? exp2(-p.max_bias / float(n) * float(head + 1u)) : exp2(-0.5 * p.max_bias / float(n) * float(2u * (head - n) + 1u));
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint group = p.heads / p.kv_heads;
    const uint kv_head = gl_WorkGroupID.y;
    const uint sequence = gl_WorkGroupID.z;
    const uint first = gl_WorkGroupID.x * QUERIES;
    uint head[QUERIES], token[QUERIES];
    for (uint j = 0u; j < QUERIES; j++) {
        const uint number = min(first + j, group * p.tokens - 1u);
        head[j] = kv_head * group + number / p.tokens;
        token[j] = number % p.tokens;
        const uint from = ((sequence * p.heads + head[j]) * p.tokens + token[j]) * p.k_dim;
        for (uint d = thread; d < p.k_dim; d += WG_SIZE) query[j][d] = q[from + d];
        for (uint d = thread; d < p.v_dim; d += WG_SIZE) sums[j][d] = 0.0;
    }
    barrier();
    const uint k_first = p.k_offset + sequence * p.k_step[0] + kv_head * p.k_step[1];
    const uint v_first = p.v_offset + sequence * p.v_step[0] + kv_head * p.v_step[1];
    float score_max[QUERIES], weight_sum[QUERIES];
    for (uint j = 0u; j < QUERIES; j++) {
        score_max[j] = LOWEST;
        weight_sum[j] = 0.0;
    }
    for (uint chunk = 0u; chunk < p.kv; chunk += WG_SIZE) {
        const uint row = chunk + thread;
        const bool inside = row < p.kv;
        float score[QUERIES];
        for (uint j = 0u; j < QUERIES; j++) score[j] = 0.0;
        if (inside) {
            const uint from = k_first + row * p.k_step[2];
            for (uint d = 0u; d < p.k_dim; d += STEPS) {
                [[unroll]] for (uint u = 0u; u < STEPS; u++) {
                    if (d + u >= p.k_dim) break;
                    const float value = k[from + d + u];
                    for (uint j = 0u; j < QUERIES; j++) score[j] += query[j][d + u] * value;
                }
            }
        }
        float rescale[QUERIES];
        float new_max = LOWEST;
        for (uint j = 0u; j < QUERIES; j++) {
            float s = score[j] * p.scale;
            if (p.softcap != 0.0) s = p.softcap * tanh_exact(s);
            if (inside && p.has_mask != 0u) {
                const uint at = (((sequence % p.mask_size[0]) * p.mask_size[1] + head[j] % p.mask_size[1]) * p.mask_size[2] + token[j]) * p.kv + row;
                s += slope_of(head[j]) * unpackHalf2x16(mask[at >> 1] >> (16u * (at & 1u))).x;
            }
            s = inside ? s : LOWEST;
            const float old_max = score_max[j];
            score_max[j] = max(old_max, wg_max(s));
            // exp_bounded() would make a number of a NaN.
            const bool is_nan = (floatBitsToUint(score[j]) & 0x7fffffffu) > 0x7f800000u;
            const float weight = inside && is_nan ? score[j] : s == LOWEST ? 0.0 : exp_bounded(s - score_max[j]);
            rescale[j] = old_max == LOWEST ? 0.0 : exp_bounded(old_max - score_max[j]);
            weight_sum[j] = weight_sum[j] * rescale[j] + wg_sum(weight);
            weights[j][thread] = weight;
            new_max = max(new_max, score_max[j]);
        }
        barrier();
        const uint rows = min(uint(WG_SIZE), p.kv - chunk);
        if (new_max != LOWEST) {
            for (uint d = thread; d < p.v_dim; d += WG_SIZE) {
                float sum[QUERIES];
                for (uint j = 0u; j < QUERIES; j++) sum[j] = sums[j][d] * rescale[j];
                for (uint i = 0u; i < rows; i += STEPS) {
                    [[unroll]] for (uint u = 0u; u < STEPS; u++) {
                        if (i + u >= rows) break;
                        const float value = v[v_first + (chunk + i + u) * p.v_step[2] + d];
                        for (uint j = 0u; j < QUERIES; j++) sum[j] += weights[j][i + u] * value;
                    }
                }
                for (uint j = 0u; j < QUERIES; j++) sums[j][d] = sum[j];
            }
        }
        barrier();
    }
    for (uint j = 0u; j < QUERIES; j++) {
        if (first + j >= group * p.tokens) break;
        float factor = 1.0;
        if (p.has_sinks != 0u) {
            const float sink = sinks[head[j]];
            const float max_with_sink = max(score_max[j], sink);
            factor = score_max[j] == LOWEST ? 0.0 : exp_bounded(score_max[j] - max_with_sink);
            weight_sum[j] = weight_sum[j] * factor + exp_bounded(sink - max_with_sink);
        }
        const float part = weight_sum[j] == 0.0 ? 0.0 : factor / weight_sum[j];
        const uint to = ((sequence * p.tokens + token[j]) * p.heads + head[j]) * p.v_dim;
        for (uint d = thread; d < p.v_dim; d += WG_SIZE) y[to + d] = sums[j][d] * part;
    }
}

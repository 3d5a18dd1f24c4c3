#version 450
// Cross entropy of each row: lse = log-sum-exp of the logits;
// loss = lse - logit of the target (0 for a negative target) or, with LABELS, the sum over labels of label * (lse - logit).
//
//   binding 0  logits F32 [rows, dim]
//   binding 1  targets I32 [rows]; with LABELS labels F32 [rows, dim]
//   binding 2  loss F32 [rows]
//   binding 3  lse F32 [rows]
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
//
// Defines: LABELS; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
#if LABELS
layout(std430, set = 0, binding = 1) readonly buffer InLabels { float labels[]; };
#else
layout(std430, set = 0, binding = 1) readonly buffer InTargets { int targets[]; };
#endif
layout(std430, set = 0, binding = 2) writeonly buffer OutLoss { float loss[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutLse { float lse[]; };
#include "training/log_sum_exp.glsl"

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x, from = row * p.dim;
    const float total = log_sum_exp(from, t);
#if LABELS
    float sum = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) sum += labels[from + i] * (total - x[from + i]);
    sum = wg_sum(sum);
#else
    const uint target = uint(targets[row]);
    const float sum = target < p.dim ? total - x[from + target] : 0.0;
#endif
    if (t == 0u) {
        loss[row] = sum;
        lse[row] = total;
    }
}

#version 450
// Gradient of the mean cross entropy with respect to the logits: (softmax(logits) - label) * dloss / (number of rows that count). A target
// stands for a label of 1 at its index. A row whose target is not a class gives zeros and does not count.
//
//   binding 0  dloss F32 [1]
//   binding 1  logits F32 [rows, dim]
//   binding 2  targets I32 [rows]; with LABELS labels F32 [rows, dim]
//   binding 3  dlogits F32 [rows, dim]; may be logits
//   binding 4  lse F32 [rows] (LSE): log-sum-exp of each row; without it, it is computed here
//
// One workgroup per row; thread t has values t, t + WG_SIZE, ...
//
// Defines: LABELS, LSE; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDloss { float dloss[]; };
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
#if LABELS
layout(std430, set = 0, binding = 2) readonly buffer InLabels { float labels[]; };
#else
layout(std430, set = 0, binding = 2) readonly buffer InTargets { int targets[]; };
#endif
layout(std430, set = 0, binding = 3) writeonly buffer OutDx { float dx[]; };
#if LSE
layout(std430, set = 0, binding = 4) readonly buffer InLse { float lse[]; };
#else
#include "training/log_sum_exp.glsl"
#endif

void main() {
    const uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.rows) return;
    const uint t = gl_LocalInvocationID.x, from = row * p.dim;
#if LSE
    const float total = lse[row];
#else
    const float total = log_sum_exp(from, t);
#endif
#if LABELS
    const float scale = dloss[0] / float(p.rows);
    for (uint i = t; i < p.dim; i += WG_SIZE) dx[from + i] = scale * (exp(max(x[from + i] - total, -87.0)) - labels[from + i]);
#else
    uint count = 0u;
    for (uint i = t; i < p.rows; i += WG_SIZE) count += uint(uint(targets[i]) < p.dim);
    count = wg_sum(count);
    const uint target = uint(targets[row]);
    const float scale = target < p.dim ? dloss[0] / float(count) : 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) dx[from + i] = scale * (exp(max(x[from + i] - total, -87.0)) - (i == target ? 1.0 : 0.0));
#endif
}

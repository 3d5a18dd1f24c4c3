#version 450
// SOFT_MAX_KQ: the softmax of attention as a node of its own: of the rows that a token sees, all others are 0.
//
//   y[h, t, r] = exp(z_r - top) / (sum over seen rows of exp(z_r - top) [+ exp(sinks[h] - top)]),  z = cap(scale * kq[h, t, r])
//
// cap(x) is softcap * tanh(x / softcap) with HAS_SOFTCAP, else x (attention/softcap.glsl).
//
// Bindings:
//   0  kq   F32 [n_head, n, rows]
//   1  pos  I32 [n], -1: padding, whose weights are 0; with SPANS I32 [n, 2]: the first and the last row that a token sees
//   2  y    F32 [n_head, n, rows]
//   3  sinks F32 [n_head] (HAS_SINKS): an extra logit of each head, without a row
//
// One workgroup for each head and token. An infinite score is no number, as a NaN: then no weight is one.
//
// Defines: HAS_SINKS HAS_SOFTCAP SPANS; those of common/reduce.glsl
#include "common/reduce.glsl"

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    uint n_head;
    uint rows;
    uint window;  // attention/window.glsl
    float scale;
    float softcap;
} p;

layout(binding = 0) readonly buffer InX { float kq[]; };
layout(binding = 1) readonly buffer Pos { int pos[]; };
layout(binding = 2) buffer OutY { float y[]; };
#if HAS_SINKS
layout(binding = 3) readonly buffer Sinks { float sinks[]; };
#endif

const float LEAST = -3.0e38;

#include "attention/softcap.glsl"
#include "attention/unfused/rows_seen.glsl"

float score(uint i) {
    const float z = capped(p.scale * kq[i]);
    return abs(z) <= 3.0e38 ? z : z - z;  // NaN
}

void main() {
    const uint line = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (line >= p.n_head * p.n) return;
    const uint tid = gl_LocalInvocationID.x, at = line * p.rows;
    const uvec2 range = rows_seen(line % p.n);
    float top = LEAST;
    for (uint r = range.x + tid; r < range.y; r += WG_SIZE) top = max(top, score(at + r));
    top = wg_max(top);
#if HAS_SINKS
    const float sink = sinks[line / p.n];
    top = max(top, sink);
#endif
    float part = 0.0;
    for (uint r = range.x + tid; r < range.y; r += WG_SIZE) part += exp(score(at + r) - top);
    float total = wg_sum(part);
#if HAS_SINKS
    total += exp(sink - top);
#endif
    for (uint r = tid; r < p.rows; r += WG_SIZE)
        y[at + r] = r >= range.x && r < range.y ? exp(score(at + r) - top) / total : 0.0;
}

#version 450
// One step of an optimizer, in place.
//   SGD    w = w (1 - lr decay) - lr g
//   AdamW  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  w = w (1 - lr decay) - lr (m c1) / (sqrt(v c2) + eps)
// with g = scale dw, c1 = 1 / (1 - beta1^t) and c2 = 1 / (1 - beta2^t).
//
//   binding 0  w F32 [elements]; with IN_PLANES an F32 weight (or a shard of one) in the planes of docs/weight_layout.md
//   binding 1  dw F32 [elements]; with IN_PLANES the shard's values begin at `first`, as those of m and v do
//   binding 2  params F32: lr, decay;  ADAMW: lr, beta1, beta2, eps, decay, c1, c2
//   binding 3, 4  m, v F32 [elements] (ADAMW)
//   last binding  scale F32 [1] (SCALED); without it g = dw
//
// One thread per value.
//
// Defines: WG_SIZE, ADAMW, SCALED, IN_PLANES
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
#if IN_PLANES
    uint first;
    uint k;        // values in a row
    uint part;     // values from one part of the planes to the next
#endif
} p;

layout(std430, set = 0, binding = 0) buffer Weights { float w[]; };
layout(std430, set = 0, binding = 1) readonly buffer InDw { float dw[]; };
layout(std430, set = 0, binding = 2) readonly buffer InParams { float params[]; };
#if ADAMW
layout(std430, set = 0, binding = 3) buffer Mean { float m[]; };
layout(std430, set = 0, binding = 4) buffer Square { float v[]; };
#endif
#if SCALED
layout(std430, set = 0, binding = 3 + 2 * ADAMW) readonly buffer InScale { float scale[]; };
#endif

void main() {
    const uint value = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (value >= p.elements) return;
#if IN_PLANES
    const uint row = value / p.k, column = value % p.k;
    const uint at = (column % 32u) / 4u * p.part + (row * ((p.k + 31u) / 32u) + column / 32u) * 4u + column % 4u, i = p.first + value;
#else
    const uint at = value, i = value;
#endif
    float g = dw[i];
#if SCALED
    g *= scale[0];
#endif
    const float lr = params[0];
#if ADAMW
    const float mean = m[i] * params[1] + g * (1.0 - params[1]);
    const float square = v[i] * params[2] + g * g * (1.0 - params[2]);
    m[i] = mean;
    v[i] = square;
    w[at] = w[at] * (1.0 - lr * params[4]) - lr * (mean * params[5]) / (sqrt(square * params[6]) + params[3]);
#else
    w[at] = w[at] * (1.0 - lr * params[1]) - lr * g;
#endif
}

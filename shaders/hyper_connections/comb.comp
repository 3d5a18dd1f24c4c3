#version 450
// The matrix by which hyper-connections mix their four streams, one per token, with rows and columns that sum to about 1 (Sinkhorn iterations).
//
//   m[src, dst] = softmax over dst (mixes[8 + 4 src + dst] * scale[2] + base[8 + 4 src + dst]) + eps
//   then divide by (eps + sums over src); then, ITERATIONS - 1 times, divide by (eps + sums over dst) and by (eps + sums over src)
//
//   binding 0  mixes F32 [tokens, 24]
//   binding 1  scale F32 [3]
//   binding 2  base F32 [24]
//   binding 3  y F32 [tokens, 4, 4]
//
// One thread per token.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint tokens;
    uint iterations;
    float eps;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InMixes { float mixes[]; };
layout(std430, set = 0, binding = 1) readonly buffer InScale { float scale[]; };
layout(std430, set = 0, binding = 2) readonly buffer InBase { float base[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutY { float y[]; };

vec4 m[4];  // rows by src

void normalize_src() {
    const vec4 sums = m[0] + m[1] + m[2] + m[3] + p.eps;
    for (uint s = 0u; s < 4u; s++) m[s] /= sums;
}

void normalize_dst() {
    for (uint s = 0u; s < 4u; s++) m[s] /= dot(m[s], vec4(1.0)) + p.eps;
}

void main() {
    const uint token = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (token >= p.tokens) return;
    for (uint s = 0u; s < 4u; s++) {
        vec4 x;
        for (uint d = 0u; d < 4u; d++) x[d] = mixes[token * 24u + 8u + 4u * s + d] * scale[2] + base[8u + 4u * s + d];
        const float top = max(max(x.x, x.y), max(x.z, x.w));
        const vec4 e = exp(x - top);
        m[s] = e / dot(e, vec4(1.0)) + p.eps;
    }
    normalize_src();
    for (uint i = 1u; i < p.iterations; i++) {
        normalize_dst();
        normalize_src();
    }
    for (uint s = 0u; s < 4u; s++) {
        for (uint d = 0u; d < 4u; d++) y[token * 16u + 4u * s + d] = m[s][d];
    }
}

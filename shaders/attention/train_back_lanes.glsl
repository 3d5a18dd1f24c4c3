// What both backward kernels of attention for CPU drivers read, and what they make of a query and a key: the weight P = exp(score - lse), and the derivative
// of the product q k, dS = P (dy v - delta) score'.
//
//   binding 0  q, binding 1  k, binding 2  v: attention/train_lanes.glsl
//   binding 3  dy F32 [tokens, n_head, VD]
//   binding 4  lse F32 [tokens, n_head]
//   binding 5  delta F32 [tokens, n_head]: sum of dy y
layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 3) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 4) readonly buffer InLse { float lse[]; };
layout(std430, set = 0, binding = 5) readonly buffer InDelta { float delta[]; };

// Of the products q k and dy v.
void derivatives(float product, float dy_v, float total, float common_part, bool seen, out float weight, out float slope) {
    const float s = score(product);
    weight = seen ? exp_bounded(s - total) : 0.0;
    slope = weight * (dy_v - common_part) * score_slope(s);
}

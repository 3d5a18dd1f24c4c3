// What both backward kernels by matrices read, and what they make of a score and of dy v: see attention/train_back.glsl. dY and V are packed times powers
// of two, and so are derivatives until the end.
//
//   binding 0  q, binding 1  k, binding 2  v, binding 3  dy: F16, attention/train_matrix.glsl
//   binding 4  lse F32 [texts, n, n_head]
//   binding 5  delta F32 [texts, n, n_head]: sum of dy y
layout(std430, set = 0, binding = 0) readonly buffer InQ { uvec4 q[]; };
layout(std430, set = 0, binding = 0) readonly buffer InQFactors { float q_factors[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { uvec4 k[]; };
layout(std430, set = 0, binding = 1) readonly buffer InKFactors { float k_factors[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { uvec4 v[]; };
layout(std430, set = 0, binding = 2) readonly buffer InVFactors { float v_factors[]; };
layout(std430, set = 0, binding = 3) readonly buffer InDy { uvec4 dy[]; };
layout(std430, set = 0, binding = 3) readonly buffer InDyFactors { float dy_factors[]; };
layout(std430, set = 0, binding = 4) readonly buffer InLse { float lse[]; };
layout(std430, set = 0, binding = 5) readonly buffer InDelta { float delta[]; };

float q_factor, k_factor, v_factor, dy_factor;

void find_factors() {
    q_factor = q_factors[factor_at(head, p.n_head, HD)];
    k_factor = k_factors[factor_at(kv_head, p.n_head_kv, HD)];
    v_factor = v_factors[factor_at(kv_head, p.n_head_kv, VD)];
    dy_factor = dy_factors[factor_at(head, p.n_head, VD)];
}

// Weight of key j for query i, and the derivative by their product, as packed values have it. product: of packed q and k; slope: of packed dy and v.
void weigh(uint i, uint j, float product, inout float slope, out float weight) {
    const uint at = (text * p.n + min(i, p.n - 1u)) * p.n_head + head;
    const float s = score(product * (q_factor * k_factor));
    weight = visible(i, j) ? exp_bounded(s - lse[at]) : 0.0;
    slope = weight * (slope - delta[at] / dy_factor / v_factor) * score_slope(s);
}

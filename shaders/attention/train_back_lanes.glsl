// What both backward kernels of attention for CPU drivers compute for a query and a key: the weight P = exp(score - lse), and the derivative by
// the dot product q . k, dS = P (dy . v - delta) score'.
#include "attention/train_back_inputs.glsl"

// product: q . k, dy_v: dy . v.
void derivatives(float product, float dy_v, float total, float common_part, bool seen, out float weight, out float slope) {
    const float s = score(product);
    weight = seen ? exp_bounded(s - total) : 0.0;
    slope = weight * (dy_v - common_part) * score_slope(s);
}

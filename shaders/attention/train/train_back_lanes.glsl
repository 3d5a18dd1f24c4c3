// What both backward kernels of attention for CPU drivers compute for a query and a key: the weight P = exp(score - lse), and the derivative by
// the dot product q . k, dS = P (dy . v - delta) score'.
#include "attention/train/train_back_inputs.glsl"

// product: q . k, dy_v: dy . v.
void derivatives(float product, float dy_v, float row_lse, float row_delta, bool seen, out float weight, out float score_grad) {
    const float s = score(product);
    weight = seen ? exp_bounded(s - row_lse) : 0.0;
    score_grad = weight * (dy_v - row_delta) * score_derivative(s);
}

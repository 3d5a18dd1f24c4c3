// Scalar functions that Vulkan lacks or specifies too loosely, and the activations made of them.

// exp of a clamped argument: beyond +-87 Vulkan's exp may overflow, and no use here needs more.
float exp_bounded(float x) { return exp(clamp(x, -87.0, 87.0)); }

float sigmoid(float x) { return 1.0 / (1.0 + exp_bounded(-x)); }

float silu(float x) { return x * sigmoid(x); }

// (1 - e) / (1 + e) with e = exp(-2|x|) loses digits to cancellation near zero; there, five terms of the series are accurate to 1e-8.
float tanh_exact(float x) {
    const float xx = x * x;
    if (xx < 0.0625) return x * (1.0 + xx * (-1.0 / 3.0 + xx * (2.0 / 15.0 + xx * (-17.0 / 315.0 + xx * (62.0 / 2835.0)))));
    const float e = exp_bounded(-2.0 * abs(x));
    return sign(x) * (1.0 - e) / (1.0 + e);
}

// erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
float erf_near(float x) {
    const float t = 1.0 / (1.0 + 0.3275911 * abs(x));
    const float series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    return sign(x) * (1.0 - series * exp_bounded(-x * x));
}

// sqrt(2 / pi) = 0.7978845608
float gelu(float x) { return 0.5 * x * (1.0 + tanh_exact(0.7978845608 * x * (1.0 + 0.044715 * x * x))); }

float gelu_erf(float x) { return 0.5 * x * (1.0 + erf_near(x * 0.7071067812)); }

float gelu_quick(float x) { return x * sigmoid(1.702 * x); }

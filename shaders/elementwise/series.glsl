// Functions by their power series, where the formula cancels or Vulkan allows too large an error. Needs elementwise/functions.glsl.

// exp(x) - 1. Near zero the difference would cancel; there, nine terms of the series are accurate to 1e-8 for |x| up to 0.5.
float expm1_exact(float x) {
    if (abs(x) > 0.5) return exp_bounded(x) - 1.0;
    float series = 1.0;
    for (int n = 9; n >= 2; n--) series = 1.0 + series * x / float(n);
    return x * series;
}

// Sine of x or, with `quarters` 1, cosine: Vulkan's own may be off by 2^-11. Quarter turns are subtracted in two parts (Cody-Waite), of which
// the first is exact for some thousand turns; Taylor series cover the remaining eighth of a turn.
float sine_of(float x, int quarters) {
    const float turns = roundEven(x * 0.6366197723675814);
    const float r = (x - turns * 1.5703125) - turns * 4.838267948966e-4;
    const float rr = r * r;
    const float s = r * (1.0 + rr * (-1.0 / 6.0 + rr * (1.0 / 120.0 + rr * (-1.0 / 5040.0 + rr * (1.0 / 362880.0)))));
    const float c = 1.0 + rr * (-0.5 + rr * (1.0 / 24.0 + rr * (-1.0 / 720.0 + rr * (1.0 / 40320.0 - rr * (1.0 / 3628800.0)))));
    const int quadrant = (int(turns) + quarters) & 3;
    const float size = (quadrant & 1) == 0 ? s : c;
    return quadrant < 2 ? size : -size;
}

float sine(float x) { return sine_of(x, 0); }

float cosine(float x) { return sine_of(x, 1); }

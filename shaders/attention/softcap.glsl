// The score that the softmax takes, of one in base 2: p.softcap * tanh(score / p.softcap) where HAS_SOFTCAP is not 0, p.softcap including log2 e
// as the score does. What is no number or infinite stays so.
#include "elementwise/functions.glsl"

float capped(float score) {
    if (HAS_SOFTCAP == 0) return score;
    return abs(score) <= 3.0e38 ? p.softcap * tanh_exact(score / p.softcap) : score;
}

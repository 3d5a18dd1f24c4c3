// Gated linear unit. GLU 0: none, 1: silu(gate) * up, 2: the clamped form SWIGLU_OAI (GLU_ALPHA, GLU_LIMIT), 3: gelu(gate) * up.
#include "elementwise/functions.glsl"

float glu(float gate, float up) {
    if (GLU == 2) {
        gate = min(gate, GLU_LIMIT);
        return gate / (1.0 + exp(-GLU_ALPHA * gate)) * (clamp(up, -GLU_LIMIT, GLU_LIMIT) + 1.0);
    }
    if (GLU == 3) return gelu(gate) * up;
    return gate / (1.0 + exp(-gate)) * up;
}

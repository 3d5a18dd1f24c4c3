// silu(gate) * up, or with GLU_LIMIT the clamped form of SWIGLU_OAI. GLU 0: none, 1: silu, 2: clamped (GLU_ALPHA, GLU_LIMIT).
float glu(float gate, float up) {
    if (GLU == 2) {
        gate = min(gate, GLU_LIMIT);
        return gate / (1.0 + exp(-GLU_ALPHA * gate)) * (clamp(up, -GLU_LIMIT, GLU_LIMIT) + 1.0);
    }
    return gate / (1.0 + exp(-gate)) * up;
}

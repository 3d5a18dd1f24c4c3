// Packs four neighbours along K as f16 in K order (gemm/matrix.glsl), clamped to the finite range of f16.
// The caller also notes their magnitude (gemm/overflow.glsl).
uvec2 pack_four(vec4 v) {
    v = clamp(v, -65504.0, 65504.0);
    return uvec2(packHalf2x16(v.xz), packHalf2x16(v.yw));
}

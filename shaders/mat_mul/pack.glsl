// Four neighbours along K as f16 in K order (mat_mul/matrix.glsl), held within what f16 can tell from infinity. Who packs activations notes
// their size as well (mat_mul/overflow.glsl).
uvec2 pack_four(vec4 v) {
    v = clamp(v, -65504.0, 65504.0);
    return uvec2(packHalf2x16(v.xz), packHalf2x16(v.yw));
}

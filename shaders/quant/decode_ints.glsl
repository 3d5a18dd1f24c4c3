// unit_decode by way of unit_ints, for types that have it: weight = scale * q - bias.
void unit_decode(UnitRaw r, out vec4 w[8]) {
    uint q[8];
    vec2 scale, bias;
    unit_ints(r, q, scale, bias);
    [[unroll]] for (int i = 0; i < 8; i++) {
#if UNIT_SIGNED
        const ivec4 b = ivec4(int(q[i] << 24) >> 24, int(q[i] << 16) >> 24, int(q[i] << 8) >> 24, int(q[i]) >> 24);
#else
        const uvec4 b = uvec4(q[i] & 0xffu, (q[i] >> 8) & 0xffu, (q[i] >> 16) & 0xffu, q[i] >> 24);
#endif
#if UNIT_HALVES
        w[i] = i < 4 ? scale.x * vec4(b) - bias.x : scale.y * vec4(b) - bias.y;
#elif UNIT_BIAS
        w[i] = scale.x * vec4(b) - bias.x;
#else
        w[i] = scale.x * vec4(b);
#endif
    }
}

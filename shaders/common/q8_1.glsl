// Writes Q8_1 rows (docs/architecture.md): per row `units` x 16 bytes of int8 (values 0..15 of each unit), again for values 16..31, then 8 bytes
// a unit: f32 d, two f16 sums of the halves' int8.
//
// The including shader has a uint buffer y_words[] and includes common/reduce.glsl with REDUCE_GROUPS 1.
//   void q8_1_store(uint row, uint units, uint quad, vec4 v, bool there)
// Eight neighbouring threads hold one unit: quad = 8 * unit + lane, four values each. With REDUCE_SUBGROUP 0 every thread of the workgroup
// must call; `there` says whether this one has something to store.

uint q8_1_stride(uint units) { return (units * 10u + 3u) & ~3u; }

void q8_1_store(uint row, uint units, uint quad, vec4 v, bool there) {
    const vec4 size = abs(v);
    float d = group_max(max(max(size.x, size.y), max(size.z, size.w)), 8u) / 127.0;
    // Below 2^-126 a device may flush d to zero, and 1 / d overflows.
    if (d < 1.17549435e-38) d = 0.0;
    const float inverse = d > 0.0 ? 1.0 / d : 0.0;
    const ivec4 q = ivec4(clamp(roundEven(v * inverse), -127.0, 127.0));
    const uint lane = quad & 7u;
    const bool upper = lane >= 4u;
    // Both sums in one word: each stays within 16 * 127 in size, and the borrow of the lower is undone below.
    const uint four = uint(q.x + q.y + q.z + q.w);
    const uint both = group_sum(upper ? four << 16 : four, 8u);
    if (!there) return;
    const uint unit = quad >> 3;
    const uint base = row * q8_1_stride(units);
    const uvec4 b = uvec4(q) & 0xffu;
    y_words[base + (upper ? units * 4u : 0u) + unit * 4u + (lane & 3u)] = b.x | (b.y << 8) | (b.z << 16) | (b.w << 24);
    if (lane == 0u) {
        const int lower_sum = int(both << 16) >> 16;
        const int upper_sum = (int(both) - lower_sum) >> 16;
        y_words[base + units * 8u + unit * 2u] = floatBitsToUint(d);
        y_words[base + units * 8u + unit * 2u + 1u] = packHalf2x16(vec2(lower_sum, upper_sum));
    }
}

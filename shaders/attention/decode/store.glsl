// Epilogue of attention: sinks, normalization and gate, then the store as F32, Q8_1 or F16 in unit order.
#ifdef BIND_GATE
float sigmoid(float x);  // elementwise/functions.glsl
#endif

// Normalizes a sum. max_sum: (maximum, sum of weights).
vec4 normalize_sum(vec4 total, vec2 max_sum, uint head) {
#if HAS_SINKS
    const float sink = sinks[head] * LOG2_E;
    const float new_max = max(max_sum.x, sink);
    const float rescale = exp2(max_sum.x - new_max);
    return total * rescale / (max_sum.y * rescale + exp2(sink - new_max));
#else
    return max_sum.y == 0.0 ? vec4(0.0) : total / max_sum.y;  // padding sees no row; a sum that is no number stays so
#endif
}

#if OUT_Q8_1
#include "common/q8_1.glsl"
#elif OUT_UNITS
#include "gemm/pack.glsl"
#include "gemm/units.glsl"

// Y_STRIDE: 16-byte words of a column of matrices.
void store_units(uint token, uint quad, vec4 v) {
    const uvec2 packed = pack_four(v);
#if FK / ROW_LANES >= 4
    y2[unit_place(token, 4u * quad, Y_STRIDE) / 4u] = packed;
#else
    [[unroll]] for (uint i = 0; i < 4; i++)
        y_halves[unit_place(token, 4u * quad + i, Y_STRIDE)] = uint16_t(packed[i / 2] >> (16u * (i % 2)));
#endif
}
#endif

// Four values of the result, gated.
vec4 result(uint o, uint at) {
#ifdef BIND_GATE
    vec4 gate;
    SPIN_UNTIL(gate = gate4[at], arrived(gate));
    return query4[o] * vec4(sigmoid(gate.x), sigmoid(gate.y), sigmoid(gate.z), sigmoid(gate.w));
#else
    return query4[o];
#endif
}

// Stores query4, four values per thread.
void store(uint tid, uint token0, uint head0) {
    for (uint first = 0; first < QUERIES * OUT4; first += WG_SIZE) {
        const uint o = first + tid;
        const uint token = token0 + o / (HEADS * OUT4);
        const uint quad = head0 * OUT4 + o % (HEADS * OUT4);
        const bool valid = o < QUERIES * OUT4 && token < p.n;
#if OUT_Q8_1
        const Q8_1Quad packed = q8_1_pack(quad, valid ? result(o, token * p.n_head * OUT4 + quad) : vec4(0.0));
        if (valid) q8_1_store(token, p.n_head * (VD / 32), quad, packed);
#elif OUT_UNITS
        if (valid) store_units(token, quad, result(o, token * p.n_head * OUT4 + quad));
#else
        if (valid) y4[token * p.n_head * OUT4 + quad] = not_sentinel(result(o, token * p.n_head * OUT4 + quad));
#endif
    }
}

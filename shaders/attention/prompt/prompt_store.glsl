// Stores results of attention as F32, Q8_1 or F16. Needs attention/prompt/prompt_iface.glsl, OUT_TYPE, ROW_QUADS (quads, four values each, of a head),
// and group_max and group_sum over eight neighbouring threads.
#include "common/q8_1.glsl"
#include "gemm/pack.glsl"

// Stores values 4 * quad .. 4 * quad + 3 of query i's head. For Q8_1, eight neighbouring threads call together with the quads of a unit.
void store_quad(uint i, uint quad, bool valid, vec4 v) {
    const uint token = token_of(i), at = head_of(i) * ROW_QUADS + quad;
    valid = valid && token < p.n;
    if (OUT_TYPE == OUT_Q8_1) {
        const Q8_1Quad packed = q8_1_pack(at, valid ? v : vec4(0.0));
        if (valid) q8_1_store(token, p.n_head * (ROW_QUADS / 8u), at, packed);
    } else if (OUT_TYPE == OUT_F16) {
        if (valid) y2[token * 2u * p.y_stride + at] = pack_four(v);
    } else if (valid)
        y4[token * p.n_head * ROW_QUADS + at] = v;
}

// What the kernels of attention in training have in common, those by tiles (attention/train_tiles.glsl) and those by lanes (attention/train_lanes.glsl):
// their parameters, who sees whom, and the slope of a score.
//
// q F32 [tokens, n_head, hd], k F32 [tokens, n_head_kv, hd], v F32 [tokens, n_head_kv, vd]; the tokens are texts of p.n tokens, one after the other.
// Token i of a text sees token j of it where visible(i, j) says so.
//
// Defines: ROWS_EACH, queries or keys that a workgroup has, and walks over, at a time
#extension GL_EXT_control_flow_attributes : require
#include "elementwise/functions.glsl"

layout(push_constant) uniform Push {
    uint n;             // tokens of a text
    uint n_head;
    uint n_head_kv;
    uint hd;
    uint vd;
    uint causal;        // 0: every token sees its whole text
    uint window;        // tokens that a token sees at most; 0: no bound
    uint parts;         // along the columns of what is made: 32 CHUNKS a part
    uint heads_each;    // heads of Q that a workgroup adds up
    float scale;
    float softcap;      // 0: none
} p;

#define t gl_LocalInvocationIndex

// What is decided for each value of a tile is a select, not a branch: a load in a branch waits alone, and SwiftShader's compiler takes minutes for some
// dozens of branches one after the other. mix() and && of variables are selects; ?: and && of expressions are not.
bool visible(uint i, uint j) {
    const bool there = all(lessThan(uvec2(i, j), uvec2(p.n)));
    const bool causal = p.causal != 0u, later = j > i;
    const bool windowed = p.window != 0u, left_behind = j + p.window <= i;
    const bool hidden = later || (windowed && left_behind);
    return there && !(causal && hidden);
}

// Derivative of a score by the product that it is made of.
float score_slope(float s) {
    const float part = mix(s / p.softcap, 0.0, p.softcap == 0.0);
    return p.scale * (1.0 - part * part);
}

// Groups of ROWS_EACH keys that the queries from q0 on see: the first, and the last.
uint first_keys(uint q0) { return p.causal != 0u && p.window != 0u && q0 + 1u > p.window ? (q0 + 1u - p.window) / ROWS_EACH : 0u; }
uint last_keys(uint q0) { return (p.causal != 0u ? min(q0 + ROWS_EACH - 1u, p.n - 1u) : p.n - 1u) / ROWS_EACH; }
// And of queries that see the keys from k0 on.
uint first_queries(uint k0) { return p.causal != 0u ? k0 / ROWS_EACH : 0u; }
uint last_queries(uint k0) {
    return (p.causal != 0u && p.window != 0u ? min(k0 + ROWS_EACH - 1u + p.window - 1u, p.n - 1u) : p.n - 1u) / ROWS_EACH;
}

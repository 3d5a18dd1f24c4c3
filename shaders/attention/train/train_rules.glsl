// What the training kernels of attention share, those by tiles (attention/train/train_tiles.glsl) and those by lanes (attention/train/train_lanes.glsl):
// parameters, which token sees which, and the slope of a score.
//
// q F32 [tokens, n_head, hd], k F32 [tokens, n_head_kv, hd], v F32 [tokens, n_head_kv, vd]. The tokens are several sequences of p.n tokens
// each, one after the other. Token i of a sequence sees token j of it if visible(i, j).
//
// Defines: BLOCK_ROWS, queries or keys that a workgroup owns, and walks at a time
#extension GL_EXT_control_flow_attributes : require
#include "elementwise/functions.glsl"

layout(push_constant) uniform Push {
    uint n;             // tokens of a sequence
    uint n_head;
    uint n_head_kv;
    uint hd;
    uint vd;
    uint causal;        // 0: every token sees its whole sequence
    uint window;        // most tokens that a token sees; 0: no limit
    uint parts;         // parts of the result's columns, 32 CHUNKS each
    float scale;
    float softcap;      // 0: none
} p;

#define t gl_LocalInvocationIndex

// Decisions per value of a tile are selects, not branches: a load inside a branch waits by itself, and SwiftShader takes minutes to compile
// dozens of branches in a row. mix() and && of variables compile to selects; ?: and && of expressions do not.
bool visible(uint i, uint j) {
    const bool valid = all(lessThan(uvec2(i, j), uvec2(p.n)));
    const bool causal = p.causal != 0u, later = j > i;
    const bool windowed = p.window != 0u, left_behind = j + p.window <= i;
    const bool hidden = later || (windowed && left_behind);
    return valid && !(causal && hidden);
}

// Derivative of a score by its dot product.
float score_derivative(float s) {
    const float part = mix(s / p.softcap, 0.0, p.softcap == 0.0);
    return p.scale * (1.0 - part * part);
}

// First and last group of BLOCK_ROWS keys that the queries from q0 on see.
uint first_keys(uint q0) { return p.causal != 0u && p.window != 0u && q0 + 1u > p.window ? (q0 + 1u - p.window) / BLOCK_ROWS : 0u; }
uint last_keys(uint q0) { return (p.causal != 0u ? min(q0 + BLOCK_ROWS - 1u, p.n - 1u) : p.n - 1u) / BLOCK_ROWS; }
// First and last group of BLOCK_ROWS queries that see the keys from k0 on.
uint first_queries(uint k0) { return p.causal != 0u ? k0 / BLOCK_ROWS : 0u; }
uint last_queries(uint k0) {
    return (p.causal != 0u && p.window != 0u ? min(k0 + BLOCK_ROWS - 1u + p.window - 1u, p.n - 1u) : p.n - 1u) / BLOCK_ROWS;
}

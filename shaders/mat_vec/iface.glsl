// Bindings and push constants of the mat-vec family. Optional buffers come after the first three; the planner numbers them
// (BIND_NORM, BIND_NORM_BIAS, BIND_POST_NORM, BIND_POST_RESIDUAL, BIND_SUM, BIND_BIAS, BIND_RESIDUAL, BIND_IDS, BIND_LOGITS, BIND_EXPERT_WEIGHTS,
// BIND_SELECTION_BIAS, and BIND_TOPK for the chosen experts).
//   0  weights, planes of docs/architecture.md (quant/weights.glsl)
//   1  x: F32 [tokens][x_stride floats] or Q8_1 [tokens][x_stride 16-byte words]
//   2  y: F32 [tokens][y_stride floats] or Q8_1 [tokens][y_stride 16-byte words]

layout(push_constant) uniform Push {
    Weights w;
    uint m;         // weight rows of this shard, or of one expert
    uint k;         // columns
    uint n;         // tokens
    uint x_stride;
    uint y_stride;
    uint y_offset;  // output row of this shard's first row
    uint w_row0;    // row of the whole weight where this shard begins
    uint y_units;   // Q8_1 output: units in an output row
    uint x_slots;   // rows of x a token has: 1 for all its experts, or N_USED, one for each
    float eps;      // RMS norm in the prologue
} p;

#if X_TYPE == X_F32
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer XFloats { float x1[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer XFloat4s { vec4 xf4[]; };
#else
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer XQuads { uvec4 x4[]; };
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer XPairs { uvec2 x2[]; };
#endif

#if TOPK
layout(std430, set = 0, binding = 2) coherent buffer YFloats { float y1[]; };
#elif Y_TYPE == Y_F32
layout(std430, set = 0, binding = 2) writeonly buffer YFloats { float y1[]; };
#else
layout(std430, set = 0, binding = 2) writeonly buffer YWords { uint y_words[]; };
#endif

#ifdef BIND_NORM
layout(std430, set = 0, binding = BIND_NORM) readonly buffer NormWeight { vec4 norm4[]; };
#endif
#ifdef BIND_NORM_BIAS
layout(std430, set = 0, binding = BIND_NORM_BIAS) readonly buffer NormBias { vec4 norm_bias4[]; };
#endif
#ifdef BIND_POST_NORM
layout(std430, set = 0, binding = BIND_POST_NORM) readonly buffer PostNorm { vec4 post_norm4[]; };
layout(std430, set = 0, binding = BIND_POST_RESIDUAL) SYNC_INPUT buffer PostResidual { vec4 post_residual4[]; };
#endif
#ifdef BIND_SUM
layout(std430, set = 0, binding = BIND_SUM) writeonly buffer Sum { vec4 sum4[]; };
#endif
#ifdef BIND_BIAS
layout(std430, set = 0, binding = BIND_BIAS) readonly buffer Bias { float bias1[]; };
#endif
#ifdef BIND_RESIDUAL
layout(std430, set = 0, binding = BIND_RESIDUAL) SYNC_INPUT buffer Residual { float residual1[]; };
#endif
#ifdef BIND_IDS
layout(std430, set = 0, binding = BIND_IDS) SYNC_INPUT buffer Ids { int ids[]; };
#endif
#ifdef BIND_EXPERT_WEIGHTS
layout(std430, set = 0, binding = BIND_EXPERT_WEIGHTS) SYNC_INPUT buffer ExpertWeights { float expert_weight[]; };
#endif
#ifdef BIND_LOGITS
layout(std430, set = 0, binding = BIND_LOGITS) SYNC_INPUT buffer RouterLogits { float router_logits[]; };
#endif
#ifdef BIND_SELECTION_BIAS
layout(std430, set = 0, binding = BIND_SELECTION_BIAS) readonly buffer SelectionBias { float selection_bias[]; };
#define SELECTION_BIAS(e) selection_bias[e]
#endif
#if TOPK || CHOOSE
layout(std430, set = 0, binding = BIND_TOPK) writeonly buffer ChosenWeights { float chosen_weights[]; };
layout(std430, set = 0, binding = BIND_TOPK + 1) writeonly buffer ChosenIds { int chosen_ids[]; };
#endif
#if TOPK
layout(std430, set = 0, binding = BIND_TOPK + 2) coherent buffer Tickets { uint tickets[]; };
#endif

// Bindings and push constants of the GEMV kernels.
//
//   0  weights, planes (quant/weights.glsl, docs/weight_layout.md)
//   1  x: F32, x_stride floats per row; or Q8_1, x_stride 16-byte words per row
//   2  y: F32, y_stride floats per row; or Q8_1, y_units units per row
//
// Optional buffers follow. The planner defines the binding of each that a kernel has:
//   BIND_NORM            F32 [k]                    weight of the norm in the prologue (PROLOGUE_NORM)
//   BIND_NORM_BIAS       F32 [k]                    bias of that norm, which is then a layer norm
//   BIND_POST_NORM       F32 [k]                    weight of a norm of x that comes first (gemv/act.glsl)
//   BIND_POST_RESIDUAL   F32 [k]                    added to the result of that norm
//   BIND_SUM             F32 [k], out               the sum of the two
//   BIND_BIAS            F32 [rows of W]            with experts, the rows of all experts
//   BIND_MULTIPLIER      F32 [tokens][output rows]  what gelu makes is multiplied by it; of one token from value multiplier_at on
//   BIND_RESIDUAL        F32 [tokens][output rows]  added to y
//   BIND_IDS             I32 [tokens][N_USED]       chosen experts
//   BIND_EXPERT_WEIGHTS  F32 [tokens][N_USED]       their weights (EXPERTS_SUMMED)
//   BIND_LOGITS          F32 [N_EXPERT]             router logits (CHOOSE)
//   BIND_SELECTION_BIAS  F32 [N_EXPERT]             added for the choice of experts, not for their weights
//   BIND_TOPK            F32 [N_USED], out          weights of the experts that this kernel chooses (TOPK or CHOOSE)
//   BIND_TOPK + 1        I32 [N_USED], out          their ids
//   BIND_TOPK + 2        uint                       counter of arrivals (TOPK; common/ticket.glsl)

layout(push_constant) uniform Push {
    Weights w;
    uint m;         // rows of this shard, or of one expert
    uint k;         // values in a row of W
    uint n;         // tokens
    uint x_stride;  // from one row of x to the next
    uint y_stride;  // from one row of y to the next
    uint y_offset;  // where in a row of y the results of this shard begin
    uint w_row0;    // row of the whole tensor where this shard begins
    uint y_units;   // units in a row of y (Y_Q8_1)
    uint x_slots;   // rows of x per token: 1, which its experts share, or N_USED, one for each of them
    float eps;      // of the norm in the prologue
#ifdef BIND_MULTIPLIER
    float scale;    // of the sums that gelu takes
    uint multiplier_at;
#endif
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
#ifdef BIND_MULTIPLIER
layout(std430, set = 0, binding = BIND_MULTIPLIER) SYNC_INPUT buffer Multiplier { float multiplier1[]; };
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

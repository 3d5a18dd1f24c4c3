// Inputs of all backward kernels of attention in training:
//
//   binding 0  q, binding 1  k, binding 2  v: attention/train/train_rules.glsl
//   binding 3  dy F32 [tokens, n_head, vd]
//   binding 4  lse F32 [tokens, n_head]: log-sum-exp of the scores of each row
//   binding 5  delta F32 [tokens, n_head]: dy . y
layout(std430, set = 0, binding = 0) readonly buffer InQ { float q[]; };
layout(std430, set = 0, binding = 1) readonly buffer InK { float k[]; };
layout(std430, set = 0, binding = 2) readonly buffer InV { float v[]; };
layout(std430, set = 0, binding = 3) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 4) readonly buffer InLse { float lse[]; };
layout(std430, set = 0, binding = 5) readonly buffer InDelta { float delta[]; };

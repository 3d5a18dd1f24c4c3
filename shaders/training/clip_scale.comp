#version 450
// Gradient clipping: norm = sqrt(sum of squares), scale = min(1, max_norm / (norm + 1e-6)). A single thread.
//
//   binding 0  sum F32 [1]
//   binding 1  scale F32 [1]
//   binding 2  norm F32 [1]
layout(local_size_x = 1) in;

layout(push_constant) uniform Push {
    float max_norm;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InSum { float sum[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutScale { float scale[]; };
layout(std430, set = 0, binding = 2) writeonly buffer OutNorm { float norm[]; };

void main() {
    const float size = sqrt(sum[0]);
    norm[0] = size;
    scale[0] = min(1.0, p.max_norm / (size + 1e-6));
}

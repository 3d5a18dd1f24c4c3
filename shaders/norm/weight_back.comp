#version 450
// Gradient of a norm's weight, the sum over rows of dy n with n the normed x, and for NORM also of its bias, the sum of dy. Each workgroup
// covers `block` rows; sums/columns.comp adds up the blocks.
//
//   binding 0  dy F32 [rows, dim]
//   binding 1  x F32 [rows, dim]
//   binding 2  scale F32 [rows, 2]: mean and scale of each row (norm/row_scale.comp)
//   binding 3  dw F32 [blocks, dim]
//   binding 4  db F32 [blocks, dim] (CENTER)
//
// One thread per column of a block; it walks the rows in order.
//
// Defines: WG_SIZE; CENTER 1: NORM
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint rows;
    uint dim;
    uint block;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InDy { float dy[]; };
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 2) readonly buffer InScale { vec2 scale[]; };
layout(std430, set = 0, binding = 3) writeonly buffer OutDw { float dw[]; };
#if CENTER
layout(std430, set = 0, binding = 4) writeonly buffer OutDb { float db[]; };
#endif

void main() {
    const uint column = gl_WorkGroupID.x * WG_SIZE + gl_LocalInvocationID.x;
    if (column >= p.dim) return;
    const uint first = gl_WorkGroupID.y * p.block, end = min(first + p.block, p.rows);
    float products = 0.0, plain = 0.0;
    for (uint row = first; row < end; row++) {
        const float g = dy[row * p.dim + column];
        products += g * (x[row * p.dim + column] - scale[row].x) * scale[row].y;
        plain += g;
    }
    dw[gl_WorkGroupID.y * p.dim + column] = products;
#if CENTER
    db[gl_WorkGroupID.y * p.dim + column] = plain;
#endif
}

#version 450
// Copies the rows of one plane of a quantized tensor in another order, byte by byte.
//
//   binding 0  x, planes of a tensor (docs/weight_layout.md)
//   binding 1  y, likewise; all rows of the plane are written
//
// Row i of y, as it is stored ([y_size]), has number sum of i[a] * y_count[a] in the view through which y is filled. That number, split along
// [x_size] into j, is row x_row0 + sum of j[a] * x_step[a] of x. One thread per word of y.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint y_size[3];
    uint y_count[3];
    uint x_size[3];
    uint x_step[3];
    uint x_row0;
    uint rows;
    uint row_bytes;
    uint x_first;    // word of the tensor at which the plane begins
    uint y_first;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    const uint bytes = p.rows * p.row_bytes;
    if (4u * i >= bytes) return;
    uint word = 0u;
    for (uint b = 0u; b < 4u && 4u * i + b < bytes; b++) {
        uint row = (4u * i + b) / p.row_bytes;
        uint number = 0u;
        for (int axis = 2; axis >= 0; axis--) {
            number += (row % p.y_size[axis]) * p.y_count[axis];
            row /= p.y_size[axis];
        }
        uint from = p.x_row0;
        for (int axis = 2; axis >= 0; axis--) {
            from += (number % p.x_size[axis]) * p.x_step[axis];
            number /= p.x_size[axis];
        }
        const uint at = from * p.row_bytes + (4u * i + b) % p.row_bytes;
        word |= ((x[p.x_first + at / 4u] >> (8u * (at % 4u))) & 0xffu) << (8u * b);
    }
    y[p.y_first + i] = word;
}

#version 450
// A box of up to four axes, copied value by value between places given by strides (in values, last axis last).
//
//   binding 0  x F32: value i of the box comes from sum of (i[a] % x_size[a]) * x_stride[a], or is 0 where FILL is 1 and some i[a] >= x_size[a]
//   binding 1  y F32: it goes to y_offset + sum of i[a] * y_stride[a]
//
// A thread takes one value.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uvec4 box;
    uvec4 x_size;
    uvec4 x_stride;
    uvec4 y_stride;
    uint y_offset;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };

void main() {
    uint rest = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (rest >= p.box.x * p.box.y * p.box.z * p.box.w) return;
    uvec4 i;
    for (int axis = 3; axis >= 0; axis--) {
        i[axis] = rest % p.box[axis];
        rest /= p.box[axis];
    }
#if FILL
    const bool there = all(lessThan(i, p.x_size));
#else
    const bool there = true;
#endif
    const uvec4 from = (i % p.x_size) * p.x_stride;
    const uvec4 to = i * p.y_stride;
    y[p.y_offset + to.x + to.y + to.z + to.w] = there ? x[from.x + from.y + from.z + from.w] : 0.0;
}

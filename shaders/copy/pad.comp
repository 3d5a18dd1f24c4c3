#version 450
// PAD of 32-bit values: adds values before and after them along each axis, zeros or, with CIRCULAR 1, those of the other end.
//
//   binding 0  x [size], with strides in values
//   binding 1  y [big]: value i is x at i - before
//
// One thread per value of y.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uvec4 big;
    uvec4 size;
    uvec4 stride;
    uvec4 before;
    uint offset;
} p;

layout(std430, set = 0, binding = 0) readonly buffer InX { uint x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { uint y[]; };

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.big.x * p.big.y * p.big.z * p.big.w) return;
    uint rest = i;
    uint from = p.offset;
    bool valid = true;
    for (int axis = 3; axis >= 0; axis--) {
        const uint n = p.size[axis];
        const uint at = rest % p.big[axis];
        rest /= p.big[axis];
#if CIRCULAR
        from += (at + n - p.before[axis] % n) % n * p.stride[axis];
#else
        valid = valid && at >= p.before[axis] && at - p.before[axis] < n;
        from += (at - p.before[axis]) * p.stride[axis];
#endif
    }
    uint v = 0u;
    if (valid) v = x[from];
    y[i] = v;
}

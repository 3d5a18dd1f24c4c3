#version 450
// Values by their position.
//
//   binding 0  y F32 [batches, rows, columns]
//   binding 1  x F32, for FUNCTION 2 to 4
//
//   FUNCTION 0  a
//   FUNCTION 1  a + b * (index of the value)
//   FUNCTION 2  x [batches, columns] on the diagonal, 0 elsewhere
//   FUNCTION 3  x, but -inf where column > row + first
//   FUNCTION 4  x, but 0 outside a triangle: kept where column < row + first (upper 0) or column >= row + first (upper 1)
//
// One thread per value.
layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint elements;
    uint rows;
    uint columns;
    int first;
    uint upper;
    float a;
    float b;
} p;

layout(std430, set = 0, binding = 0) writeonly buffer OutY { float y[]; };
#if FUNCTION >= 2
layout(std430, set = 0, binding = 1) readonly buffer InX { float x[]; };
#endif

void main() {
    const uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WG_SIZE + gl_LocalInvocationID.x;
    if (i >= p.elements) return;
    const uint column = i % p.columns, row = i / p.columns % p.rows;
#if FUNCTION == 0
    y[i] = p.a;
#elif FUNCTION == 1
    y[i] = p.a + p.b * float(i);
#elif FUNCTION == 2
    y[i] = row == column ? x[i / (p.rows * p.columns) * p.columns + column] : 0.0;
#elif FUNCTION == 3
    y[i] = int(column) > int(row) + p.first ? uintBitsToFloat(0xff800000u) : x[i];
#else
    y[i] = (int(column) < int(row) + p.first) != (p.upper == 1u) ? x[i] : 0.0;
#endif
}

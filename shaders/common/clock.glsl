// When the workgroups of a kernel get how far, by the device's clock (vkback/timing/stage_clocks.py). Without CLOCKS nothing of it is left.
//
//   MARK(point)   thread 0 of the workgroup notes the time, the lower word of it (Mesa 22 has zeros in the other), which is then never 0
//     MARK_BEGIN  it has started
//     MARK_THERE  what it waits for is there
//     MARK_DONE   its sums are made, as far as thread 0 makes them
//     MARK_END    its results are stored
//
// Defines: CLOCKS, BIND_CLOCKS: uint [workgroups][4]

#if CLOCKS
#extension GL_EXT_shader_realtime_clock : require

#define MARK_BEGIN 0u
#define MARK_THERE 1u
#define MARK_DONE 2u
#define MARK_END 3u

layout(std430, set = 0, binding = BIND_CLOCKS) writeonly buffer Clocks { uint clock_marks[]; };

void mark(uint point) {
    const uint group = (gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y) * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (gl_LocalInvocationIndex == 0u) clock_marks[4u * group + point] = clockRealtime2x32EXT().x | 1u;
}
#define MARK(POINT) mark(POINT)
#else
#define MARK(POINT)
#endif

// Time stamps inside a kernel: when each workgroup reaches which point, by the device's clock (vkback/timing/stage_clocks.py).
// Compiled out without CLOCKS.
//
//   MARK(point)   thread 0 stores the lower word of the clock (Mesa 22 leaves the upper one 0), with bit 0 set, so that it is never 0
//     MARK_BEGIN   the workgroup has started
//     MARK_INPUTS  the inputs it waits for have arrived
//     MARK_DONE    thread 0 has finished its part of the sums
//     MARK_END     the results are stored
//
// Defines: CLOCKS, BIND_CLOCKS: uint [workgroups][4]

#if CLOCKS
#extension GL_EXT_shader_realtime_clock : require

#define MARK_BEGIN 0u
#define MARK_INPUTS 1u
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

// Integer dot product of four signed bytes packed in a word. glslc 2023 lacks GL_EXT_integer_dot_product, so the SPIR-V instruction OpSDot is
// declared here: opcode 4450, capabilities DotProductInput4x8BitPacked (6018) and DotProduct (6019), packed vector format literal 0.
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_control_flow_attributes : require

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int op_sdot_4x8(int a, int b, spirv_literal int packed_format);

int dot4(uint a, uint b) {
    return op_sdot_4x8(int(a), int(b), 0);
}

// Dot products of the two halves (16 bytes each) of q and x, added to `start`.
ivec2 halves_dot(uint q[8], uint x[8], ivec2 start) {
    ivec2 sum = start;
    [[unroll]] for (int i = 0; i < 4; i++) {
        sum.x += dot4(q[i], x[i]);
        sum.y += dot4(q[i + 4], x[i + 4]);
    }
    return sum;
}

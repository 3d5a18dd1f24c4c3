// Integer dot products of four bytes packed in a word, signed (dot4) or not (dot4_unsigned). glslc 2023 lacks GL_EXT_integer_dot_product, so
// the SPIR-V instructions OpSDot (4450) and OpUDot (4451) are declared here, with the capabilities DotProductInput4x8BitPacked (6018) and
// DotProduct (6019), packed vector format literal 0. A device that has one has both.
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_control_flow_attributes : require

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int op_sdot_4x8(int a, int b, spirv_literal int packed_format);
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4451)
uint op_udot_4x8(uint a, uint b, spirv_literal int packed_format);

int dot4(uint a, uint b) {
    return op_sdot_4x8(int(a), int(b), 0);
}

uint dot4_unsigned(uint a, uint b) {
    return op_udot_4x8(a, b, 0);
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

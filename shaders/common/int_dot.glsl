// Integer dot product of four signed bytes. glslc 2023 has no GL_EXT_integer_dot_product, so OpSDot is named directly:
// opcode 4450, capabilities DotProductInput4x8BitPacked (6018) and DotProduct (6019), packed vector format literal 0.
#extension GL_EXT_spirv_intrinsics : require

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int op_sdot_4x8(int a, int b, spirv_literal int packed_format);

int dot4(uint a, uint b) {
    return op_sdot_4x8(int(a), int(b), 0);
}

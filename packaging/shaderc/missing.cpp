// What shaderc calls and glslang has only with its front end for HLSL, which is left out.
#define ENABLE_HLSL
#include "glslang/Public/ShaderLang.h"

void glslang::TShader::setHlslIoMapping(bool) {}

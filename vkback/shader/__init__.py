"""GLSL variants to SPIR-V."""

from vkback.shader.compiler import Compiler, find_compiler
from vkback.shader.errors import CompileError, NoCompiler
from vkback.shader.library import ShaderLibrary
from vkback.shader.source import Variant, register_include

__all__ = ["CompileError", "Compiler", "NoCompiler", "ShaderLibrary", "Variant", "find_compiler", "register_include"]

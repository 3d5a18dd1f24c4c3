"""GLSL variants to SPIR-V."""

from vkback.shader.compiler import Compiler, find_compiler
from vkback.shader.errors import CompileError, NoCompiler
from vkback.shader.interface import interface
from vkback.shader.library import ShaderLibrary
from vkback.shader.source import Spec, Variant, register_include

__all__ = ["CompileError", "Compiler", "NoCompiler", "ShaderLibrary", "Spec", "Variant", "find_compiler", "interface", "register_include"]

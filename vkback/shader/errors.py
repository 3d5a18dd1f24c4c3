"""Errors of the shader layer."""

from __future__ import annotations

from vkback.errors import VkbackError


class CompileError(VkbackError):
    """GLSL that does not compile; the text shows variant, defines and the numbered lines around each fault."""


class NoCompiler(VkbackError):  # noqa: N818  a condition, like the device layer's NoDevice
    """Neither libshaderc nor glslc is there, and the SPIR-V is not in the cache."""


class GlslError(Exception):
    """The compiler's own words, with lines as "shader:12: error: ..."."""

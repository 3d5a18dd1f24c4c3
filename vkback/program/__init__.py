"""A schedule bound to one device's memory, recorded once and replayed."""

from vkback.program.program import Program, WeightRanges, compile_kernels, dispatch_spec

__all__ = ["Program", "WeightRanges", "compile_kernels", "dispatch_spec"]

"""A schedule bound to one device's memory, recorded once and replayed."""

from vkback.program.compile import CompileTotals, KernelKey, OnKernel, compile_kernels, dispatch_spec, kernel_keys
from vkback.program.program import Program, WeightRanges

__all__ = ["CompileTotals", "KernelKey", "OnKernel", "Program", "WeightRanges", "compile_kernels", "dispatch_spec", "kernel_keys"]

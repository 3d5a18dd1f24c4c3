"""The kernels of dispatches: shaders and pipelines, compiled in parallel, counted and timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vkback.device import Device, Kernel, KernelSpec
from vkback.ops.dispatch import Dispatch
from vkback.shader import ShaderLibrary, Variant
from vkback.units import counted

KernelKey = tuple[Variant, int, int]
"""A variant, its number of bindings and its bytes of push constants."""

OnKernel = Callable[[], object]
"""Called once for each kernel that is ready, from any thread."""


@dataclass(frozen=True)
class CompileTotals:
    """How many kernels were prepared, how many of these were compiled from GLSL rather than found as SPIR-V, and the time it took."""

    kernels: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def __add__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels + other.kernels, self.compiled + other.compiled, self.seconds + other.seconds)

    def __sub__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels - other.kernels, self.compiled - other.compiled, self.seconds - other.seconds)

    def __str__(self) -> str:
        """Like "prepared 41 kernels in 9.8 s, 12 compiled from GLSL"; the others came as SPIR-V, and only the driver compiled them."""
        compiled = {0: "none", self.kernels: "all"}.get(self.compiled, str(self.compiled))
        return f"prepared {counted(self.kernels, 'kernel')} in {self.seconds:.1f} s, {compiled} compiled from GLSL"


def kernel_keys(dispatches: Iterable[Dispatch]) -> list[KernelKey]:
    """The distinct kernels of dispatches, in order."""
    return list(dict.fromkeys((d.kernel, len(d.args), len(d.push)) for d in dispatches))


def kernel_spec(library: ShaderLibrary, spirv: bytes, variant: Variant, bindings: int, push_bytes: int) -> KernelSpec:
    """What to ask the device layer for: a variant's SPIR-V with the number of buffers and push-constant bytes of its dispatches."""
    return KernelSpec(spirv, variant.name, bindings, push_bytes, library.specialization(variant), variant.subgroup_size)


def dispatch_spec(d: Dispatch, library: ShaderLibrary) -> KernelSpec:
    """What to ask the device layer for, for one dispatch."""
    return kernel_spec(library, library.spirv(d.kernel), d.kernel, len(d.args), len(d.push))


def compile_kernels(
    device: Device, library: ShaderLibrary, dispatches: Iterable[Dispatch], on_kernel: OnKernel | None = None
) -> dict[KernelKey, Kernel]:
    """The kernels of dispatches. A pipeline is compiled as soon as its shader is, while other shaders are still being compiled.

    Raises CompileError with the faults of all shaders, or the device layer's error about the first kernel that it refuses.
    """
    wanted = kernel_keys(dispatches)
    users: dict[Variant, list[KernelKey]] = {}
    for key in wanted:
        users.setdefault(key[0], []).append(key)
    under_way: dict[KernelKey, Future[list[Kernel]]] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            for variant, spirv in library.compile_each(users):
                for key in users[variant]:
                    under_way[key] = pool.submit(device.kernels, [kernel_spec(library, spirv, *key)])
                    if on_kernel is not None:
                        under_way[key].add_done_callback(lambda _: on_kernel())
            return {key: under_way[key].result()[0] for key in wanted}
        finally:  # nobody waits for the others, where this is left early
            pool.shutdown(wait=False, cancel_futures=True)

"""Kernels of dispatches: shaders and pipelines compiled in parallel, counted and timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vkback.device import Device, Kernel, KernelSpec
from vkback.ops.base import Dispatch
from vkback.shader import ShaderLibrary, Variant

KernelKey = tuple[Variant, int, int]
"""A variant, its number of bindings and its bytes of push constants."""

OnKernel = Callable[[], object]
"""Called once for each kernel that is ready, from any thread."""


@dataclass(frozen=True)
class CompileTotals:
    """How many kernels were made ready, how many of them were compiled from GLSL rather than found as SPIR-V, and the time of it all."""

    kernels: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def __add__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels + other.kernels, self.compiled + other.compiled, self.seconds + other.seconds)

    def __sub__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels - other.kernels, self.compiled - other.compiled, self.seconds - other.seconds)

    def __str__(self) -> str:
        """As "prepared 41 kernels in 9.8 s, 12 compiled from GLSL"; those that were not came as SPIR-V, for the driver alone to compile."""
        compiled = {0: "none", self.kernels: "all"}.get(self.compiled, str(self.compiled))
        return f"prepared {self.kernels} kernels in {self.seconds:.1f} s, {compiled} compiled from GLSL"


def kernel_keys(dispatches: Iterable[Dispatch]) -> list[KernelKey]:
    """The different kernels of dispatches, in order."""
    return list(dict.fromkeys((d.kernel, len(d.args), len(d.push)) for d in dispatches))


def kernel_spec(spirv: bytes, variant: Variant, bindings: int, push_bytes: int) -> KernelSpec:
    """What the device layer is asked for: a variant's SPIR-V with the buffers and the bytes of push constants of its dispatches."""
    return KernelSpec(spirv, variant.name, bindings, push_bytes, tuple(sorted(variant.spec)), variant.subgroup_size)


def dispatch_spec(d: Dispatch, library: ShaderLibrary) -> KernelSpec:
    """What one dispatch asks the device layer for."""
    return kernel_spec(library.spirv(d.kernel), d.kernel, len(d.args), len(d.push))


def compile_kernels(
    device: Device, library: ShaderLibrary, dispatches: Iterable[Dispatch], on_kernel: OnKernel | None = None
) -> dict[KernelKey, Kernel]:
    """Kernels of dispatches. A pipeline is compiled as soon as its shader is, beside the shaders that are still missing.

    Raises CompileError with the faults of all shaders, or what the device layer says of the first kernel that it refuses.
    """
    wanted = kernel_keys(dispatches)
    users: dict[Variant, list[KernelKey]] = {}
    for key in wanted:
        users.setdefault(key[0], []).append(key)
    under_way: dict[KernelKey, Future[list[Kernel]]] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for variant, spirv in library.compile_each(users):
            for key in users[variant]:
                under_way[key] = pool.submit(device.kernels, [kernel_spec(spirv, *key)])
                if on_kernel is not None:
                    under_way[key].add_done_callback(lambda _: on_kernel())
        return {key: under_way[key].result()[0] for key in wanted}

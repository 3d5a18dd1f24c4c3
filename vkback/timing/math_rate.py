"""The device's own math rate: how fast it multiplies and adds in registers, the roof of products of many tokens.

There is a rate for each kernel of shaders/gemm: cooperative matrices (f16 with f32 sums: the matrix rate), packed integer dot products,
f32. A kernel is measured against the rate of its own arithmetic, since that says how much of the time goes into anything else than
multiplying.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from vkback.device import BufferRange, Device, Kernel
from vkback.ops.cooperative_matrix import matrix_shape, matrix_spec
from vkback.ops.dispatch import pack_push
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.ops.workgroup import required_subgroup
from vkback.program.compile import kernel_of
from vkback.shader import ShaderLibrary, Variant
from vkback.timing.launches import span_us, warm_up

RATE_NAMES: dict[GemmKernel, str] = {"coop_mat": "matrix rate", "coop_reg": "matrix rate", "int_dot": "integer dot rate", "f32": "f32 rate"}

MATRIX_CUTS = ((4, 2, 4), (4, 4, 4), (8, 2, 2), (8, 4, 2))
"""Subgroups of a workgroup, matrices A and matrices B of each: which is best differs from device to device."""

DOT_SUMS, DOT_STEPS = 12, 8
"""SUMS and STEPS of shaders/probe/dot_rate.comp."""

SOFTWARE_WG, WG = (32, 64), (128, 256, 512)
"""Threads of a workgroup that are tried."""

REPETITIONS = 5


@dataclass(frozen=True)
class MathRate:
    """Best rate found, in operations a second (multiply-adds count 2), of a kernel's arithmetic; cut: the probe's setting that reached
    it."""

    kernel: GemmKernel
    flops_per_second: float
    cut: str

    @property
    def tflops(self) -> float:
        return self.flops_per_second / 1e12

    @property
    def name(self) -> str:
        return RATE_NAMES[self.kernel]


def measure_math_rate(device: Device, library: ShaderLibrary, kernel: GemmKernel) -> MathRate:
    """Run a kernel's probe in several cuts; the best of them, each the best of some runs after a warm-up.

    Raises PlanError for a kernel that the device cannot run.
    """
    return _matrix_rate(device, library) if kernel == "coop_mat" else _dot_rate(device, library, kernel)


class MathRates:
    """Rates of a device, each measured at the first request."""

    def __init__(self, device: Device, library: ShaderLibrary) -> None:
        self._device, self._library = device, library
        self._known: dict[GemmKernel, MathRate] = {}

    def of(self, kernel: GemmKernel) -> MathRate:
        kernel = "coop_mat" if kernel == "coop_reg" else kernel  # the same matrices
        if kernel not in self._known:
            self._known[kernel] = measure_math_rate(self._device, self._library, kernel)
        return self._known[kernel]


def _matrix_rate(device: Device, library: ShaderLibrary) -> MathRate:
    """Of shaders/probe/matrix_rate.comp."""
    caps = device.caps
    matrix = matrix_shape(caps)
    if matrix is None:
        raise PlanError(f"[math rate] {caps.name} has no cooperative matrices of f16 with f32 sums for subgroups")
    rows, columns, depth = matrix
    lanes, best = caps.subgroup_size, MathRate("coop_mat", 0.0, "")
    rounds, groups = (64, 8) if caps.software else (4096, 8 * (caps.shader_cores or 132))
    most = max(subgroups * a * b for subgroups, a, b in MATRIX_CUTS)
    with device.arena("matrix rate", 4 * rows * columns * most * groups + (1 << 17), "device") as arena:
        source = arena.alloc(2 * depth * (rows + columns), "source")
        sink = arena.alloc(4 * rows * columns * most * groups, "sink")
        device.upload(source, np.random.default_rng(1).uniform(-1, 1, depth * (rows + columns)).astype(np.float16).view(np.uint8))
        for subgroups, a, b in MATRIX_CUTS:
            if subgroups * lanes > caps.max_workgroup_invocations:
                continue
            spec = matrix_spec(subgroups, matrix, caps) | {"ROWS": a, "COLUMNS": b}
            variant = Variant.of("probe/matrix_rate.comp", spec=spec, subgroup_size=required_subgroup(caps))
            us = _shortest_us(device, kernel_of(device, library, variant, 2, 4), [source, sink], pack_push(rounds), groups)
            rate = 2e6 * prod(matrix) * a * b * subgroups * groups * rounds / us
            if rate > best.flops_per_second:
                best = MathRate("coop_mat", rate, f"{subgroups} subgroups of {a} x {b} matrices")
    return best


def dot_variants() -> list[Variant]:
    """The kernels of the rates of f32 products and packed integer dot products, on any device."""
    return [_dot_variant(kernel, wg) for kernel in ("f32", "int_dot") for wg in (*SOFTWARE_WG, *WG)]


def _dot_variant(kernel: str, wg: int) -> Variant:
    return Variant.of("probe/dot_rate.comp", {"INT_DOT": int(kernel == "int_dot"), "WG": wg})


def _dot_rate(device: Device, library: ShaderLibrary, kernel: GemmKernel) -> MathRate:
    """Of shaders/probe/dot_rate.comp."""
    caps = device.caps
    if kernel == "int_dot" and not caps.int_dot:
        raise PlanError(f"[math rate] {caps.name} has no packed integer dot products")
    factor = pack_push(0x01FF01FF) if kernel == "int_dot" else struct.pack("<f", 0.999)
    operations, best = (8 if kernel == "int_dot" else 2), MathRate(kernel, 0.0, "")
    rounds, groups = (256, 16) if caps.software else (512, 16 * (caps.shader_cores or 132))
    with device.arena("math rate", 4096, "device") as arena:
        sink = arena.alloc(256, "sink")
        for wg in SOFTWARE_WG if caps.software else WG:
            wg = min(wg, caps.max_workgroup_invocations)
            variant = _dot_variant(kernel, wg)
            compiled = device.kernel(library.spirv(variant), name=variant.name, bindings=1, push_bytes=12)
            us = _shortest_us(device, compiled, [sink], pack_push(rounds) + factor + pack_push(1), groups)
            rate = 1e6 * operations * DOT_SUMS * DOT_STEPS * rounds * wg * groups / us
            if rate > best.flops_per_second:
                best = MathRate(kernel, rate, f"{wg} threads")
    return best


def _shortest_us(device: Device, compiled: Kernel, buffers: Sequence[BufferRange], push: bytes, groups: int) -> float:
    """Microseconds of one launch, the best of some."""
    rec = device.recorder("math rate", timestamps=2)
    rec.timestamp("start")
    rec.dispatch(compiled, buffers, push, (groups, 1, 1), "math rate")
    rec.barrier()
    rec.timestamp("end")
    commands = rec.finish()
    warm_up(device, commands, 0.1)
    us = min(span_us(device, commands) for _ in range(REPETITIONS))
    commands.destroy()
    return us

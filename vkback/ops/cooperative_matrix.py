"""Cooperative matrices of a device: which the shaders can use, and how a driver lays them out over the lanes of a subgroup."""

from __future__ import annotations

from vkback.device import Capabilities
from vkback.ops.lowering import LowerContext
from vkback.quants import UNIT
from vkback.shader import Spec


def matrix_shapes(caps: Capabilities) -> list[tuple[int, int, int]]:
    """Matrices of f16 with f32 sums at subgroup scope that the shaders can use: rows, columns, depth; the largest first."""
    if not (caps.cooperative_matrix and caps.fp16):
        return []
    wanted = ("f16", "f16", "f32", "f32", "subgroup")
    shapes = {(s.m, s.n, s.k) for s in caps.cooperative_matrix_shapes if (s.a, s.b, s.c, s.result, s.scope) == wanted}
    fit = [s for s in shapes if not any(size % 8 for size in s) and s[2] <= UNIT]
    return sorted(fit, key=lambda s: (s[0] * s[1] * s[2], s), reverse=True)


def matrix_shape(caps: Capabilities) -> tuple[int, int, int] | None:
    """The largest of `matrix_shapes`, or None."""
    return next(iter(matrix_shapes(caps)), None)


def fragments_possible(matrix: tuple[int, int, int], caps: Capabilities) -> bool:
    """Whether each lane holds eight elements of a matrix B; that the driver lays them out alike everywhere is for a probe to find out."""
    return matrix[1] * matrix[2] == 8 * caps.subgroup_size


KNOWN_ROW_LANES = {"nvidia": 4, "software": 8}
"""Lanes that share a row of a matrix, by vendor: NVIDIA's driver 580 and Mesa 26's llvmpipe, as vkback/program/fragments.py found them."""


def row_lanes(ctx: LowerContext) -> int:
    """Neighbouring lanes that share a row of a matrix (shaders/mat_mul/matrix.glsl), 0 where that is not known."""
    return KNOWN_ROW_LANES.get(ctx.caps.vendor, 0) if ctx.row_lanes is None else ctx.row_lanes


def matrix_spec(subgroups: int, matrix: tuple[int, int, int], caps: Capabilities) -> Spec:
    """Specialization constants of shaders/mat_mul/matrix.glsl: of a workgroup of so many subgroups, and matrices of so many rows, columns
    and depth."""
    rows, columns, depth = matrix
    return {"WG": subgroups * caps.subgroup_size, "SG": caps.subgroup_size, "FM": rows, "FN": columns, "FK": depth}

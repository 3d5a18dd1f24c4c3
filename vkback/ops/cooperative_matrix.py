"""Cooperative matrices of a device: which the shaders can use, and how a driver lays them out over the lanes of a subgroup."""

from __future__ import annotations

from vkback.device import Capabilities
from vkback.ops.family import CountOr, declare
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


declare(
    "cooperative_matrix",
    match={},
    params={"row_lanes": CountOr("unknown")},  # neighbouring lanes that share a row of a matrix (shaders/gemm/matrix.glsl)
)


def row_lanes(ctx: LowerContext) -> int:
    """Neighbouring lanes that share a row of a matrix (shaders/gemm/matrix.glsl), 0 where that is not known: as the check at start-up
    found them (vkback/program/fragments.py), without it, as for a recorded device, as the tables say."""
    if ctx.row_lanes is not None:
        return ctx.row_lanes
    known = ctx.tuning.pick("cooperative_matrix")["row_lanes"]
    return 0 if known == "unknown" else int(known)


def workgroup_spec(subgroups: int, caps: Capabilities) -> Spec:
    """Specialization constants of a workgroup of so many subgroups."""
    return {"WG": subgroups * caps.subgroup_size, "SG": caps.subgroup_size}


def matrix_spec(subgroups: int, matrix: tuple[int, int, int], caps: Capabilities) -> Spec:
    """Specialization constants of shaders/gemm/matrix.glsl: of a workgroup of so many subgroups, and matrices of so many rows, columns
    and depth."""
    rows, columns, depth = matrix
    return workgroup_spec(subgroups, caps) | {"FM": rows, "FN": columns, "FK": depth}

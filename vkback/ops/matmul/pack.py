"""Activations packed as coop_mat takes them: F16, in fragment order or by rows."""

from __future__ import annotations

from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.cooperative_matrix import matrix_spec, workgroup_spec
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, arg_of, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.matmul.gemm_problem import GemmShape, f16_misfits
from vkback.ops.matmul.route import max_tiles
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import required_subgroup
from vkback.quants import UNIT
from vkback.shader import Variant, interface


def packs_glu(shape: GemmShape, glu: bool, k: int) -> bool:
    """Whether a product of rows of k weights can leave its output packed: whole sums, whole units of a tile and matrices of a part."""
    whole = min(shape.split_k, ceil_div(k, UNIT)) == 1
    return shape.kernel == "coop_mat" and whole and not f16_misfits(shape, glu)


def packed_columns(n: int, shape: GemmShape, experts: int = 0) -> int:
    """Columns that a packed tensor has room for: whole tiles; experts: of a grouped product, 0 of a dense one."""
    tiles = max_tiles(n, experts, shape.tile_n) if experts else ceil_div(n, shape.tile_n)
    return tiles * shape.tile_n


def packed(name: str, n: int, k: int, shape: GemmShape, experts: int = 0) -> Tensor:
    """Activations as coop_mat takes them (shaders/gemm/matrix.glsl): F16, K filled up to units, columns to whole tiles."""
    return Tensor(name, "F16", (packed_columns(n, shape, experts), ceil_div(k, UNIT) * UNIT))


def order_word(shape: GemmShape) -> str:
    """How packed values lie, in words."""
    return "fragments" if shape.fragments else "rows"


def packed_stride(k: int, shape: GemmShape, caps: Capabilities) -> int:
    """16-byte words of a column of such a tensor, or in fragment order of a column of matrices."""
    units = ceil_div(k, UNIT)
    return units * (UNIT // shape.matrix[2]) * caps.subgroup_size if shape.fragments else units * UNIT // 8


def pack_f16(
    x: Tensor,
    y: Tensor,
    n: int,
    shape: GemmShape,
    caps: Capabilities,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    routes: Tensor | None = None,
    x_shared: int = 1,
    scale: float = 1.0,
    factors: Tensor | None = None,
    stores_factors: bool = False,
    by_rows: bool = False,
) -> Dispatch:
    """The dispatch that makes `y` (see `packed`) of x F32 [rows, k].

    n        columns: tokens, or with a route slots
    eps      given: every row is RMS-normed first, and multiplied by `norm` F32 [k] if there is one
    routes   of a grouped product: columns are the positions in its tiles
    factors  F32 [rows], with eps: 1 / rms of each row; stored here for others (stores_factors), or as another launch has stored them
    by_rows  each row is multiplied by a power of two of its own, which brings its largest value to 2^13 or just above; what undoes it is
             stored in `factors`. There is no norm then
    """
    k = x.shape[-1]
    # Every workgroup that needs a sum over a row reads the whole row.
    sums = by_rows or (eps is not None and (factors is None or stores_factors))  # adds up squares, or looks for the largest value
    subgroups = pack_subgroups(shape, caps, sums)
    norms = 3 if by_rows else 0 if eps is None else 1 if norm is None else 2
    # Without fragments x stays in rows, and the shader declares no matrices.
    cut = matrix_spec(subgroups, shape.matrix, caps) if shape.fragments else workgroup_spec(subgroups, caps)
    spec = cut | {
        "NORM": norms,
        "GROUPED": int(routes is not None),
        "TILE_N": shape.tile_n if routes is not None else 1,
        "FACTORS": 0 if factors is None or by_rows else 1 if stores_factors else 2,
    }
    columns = shape.matrix[1] if shape.fragments else subgroups
    rooms = y.shape[0]
    groups = ceil_div(rooms if routes is not None else n, columns)
    # More workgroups than one axis of the grid may have go into the second.
    grid_y = ceil_div(groups, MAX_GROUPS_X)
    groups_k = ceil_div(y.shape[1], 64 * subgroups) if shape.fragments else 1
    if sums:  # each workgroup of a group adds up its squares anew
        groups_k = min(groups_k, max(1, NORM_GROUPS // groups))
    shader = "gemm/pack_f16.comp"
    buffers = {
        "X": Arg(x),
        "Y": Arg(y, "w"),
        "NormWeight": arg_of(norm),
        "Route": arg_of(routes),
        "Factors": arg_of(factors, "w" if stores_factors or by_rows else "r"),
        "Overflow": Arg(overflow_word(y), "rw"),
    }
    return Dispatch(
        Variant.of(shader, {"FRAGMENTS": int(shape.fragments)}, spec=spec, subgroup_size=required_subgroup(caps)),
        interface(shader).bound(buffers, Arg(x)),
        pack_push(n, k, packed_stride(k, shape, caps), rooms // shape.tile_n, x_shared, float(scale), float(eps or 0.0)),
        (ceil_div(groups, grid_y), grid_y, groups_k),
        "PACK_F16",
        y.name,
        f"f16 {order_word(shape)}{', after RMS norm' if eps is not None else ', rows by powers of two' if by_rows else ''}",
        nbytes=nbytes(x) + 2 * n * y.shape[1],
        flops=4 * x.elements,
    )


NORM_GROUPS = 128
"""Workgroups wanted of a packing that norms: about as many as large GPUs have multiprocessors."""


def pack_subgroups(shape: GemmShape, caps: Capabilities, sums: bool) -> int:
    """Subgroups of a workgroup of shaders/gemm/pack_f16.comp. sums: it adds up squares of rows, and more loads on their way help."""
    for subgroups in (16, 8) if sums else (8,):
        staged = 16 * subgroups * shape.matrix[1] * 9 + 4 * shape.matrix[1] if shape.fragments else 0
        if subgroups * caps.subgroup_size <= caps.max_workgroup_invocations and staged <= caps.max_shared_memory:
            return subgroups
    return 4

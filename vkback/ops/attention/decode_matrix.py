"""Attention of few tokens by cooperative matrices: shaders/attention/decode/matrix.comp as pure lowering helpers.

The heads that share a row of K or V are the columns of a matrix, so that a row is read once for all of them and its arithmetic is next to
nothing: what is left is reading the cache. K and V go from memory into registers, where each lane has whole words of rows, as
shaders/gemm/coop_reg.glsl has them of weights. It counts on which lanes share a row of a matrix (`cooperative_matrix.row_lanes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkback.constants import LOG2_E
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.attention.prompt import queries_f16, read_bytes
from vkback.ops.cooperative_matrix import matrix_shapes, matrix_spec, row_lanes
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, arg_of, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import units_stride
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import required_subgroup, workgroup_size
from vkback.shader import Variant, interface

SHADER = "attention/decode/matrix.comp"


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of few tokens.

    q       F32 [n, n_head, hd]
    cache   F16 [n_head_kv, n_ctx, hd], K's and V's
    pos     I32 [n], -1: padding
    y       F32 or Q8_1 [n, n_head * hd], or F16 in unit order for a product of shape `units`
    sinks   F32 [n_head]
    paged   slots I32 [n] and pages I32 [n_slots, max_pages] of `page` rows; none: the caches hold one sequence
    window  as kernels take it: rows that a token sees at most, 0: all; with CHUNK_BIT of chunks
    """

    q: Tensor
    cache_k: Tensor
    cache_v: Tensor
    pos: Tensor
    y: Tensor
    scale: float
    window: int = 0
    rows_seen: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    page: int = 0
    paged: Sequence[Tensor] = ()
    units: GemmShape | None = None
    label: str = ""


@dataclass(frozen=True)
class DecodeMatrixShape:
    """How it is cut.

    heads           query heads of a workgroup
    subgroups       of a workgroup; they take blocks of rows in turns
    matrix          rows, columns and depth of a matrix
    row_lanes       neighbouring lanes that share a row of one
    groups          workgroups wanted for a token when the context is full
    rows_per_split  rows below which a split is not worth its own workgroup
    """

    heads: int
    subgroups: int
    matrix: tuple[int, int, int]
    row_lanes: int
    groups: int
    rows_per_split: int

    def splits(self, n_head: int, rows: int) -> int:
        """Workgroups that share the rows of a token and its heads, of at most so many rows."""
        return max(1, min(ceil_div(self.groups, n_head // self.heads), ceil_div(rows, self.rows_per_split)))


def shape_for(choice: Choice, n_head: int, n_head_kv: int, hd: int, page: int, ctx: LowerContext) -> DecodeMatrixShape | None:
    """The tables' choice, adjusted to the device; None where it has no matrices that the kernel can use for such heads."""
    caps, lanes = ctx.caps, row_lanes(ctx)
    if not lanes or not caps.has_subgroup_ops("arithmetic", "shuffle", "vote"):
        return None
    fitting = [s for s in matrix_shapes(caps) if _fits(s, lanes, hd, page, caps)]
    group = n_head // n_head_kv
    # The fewest columns that hold all heads of a kv head; else as many heads as the widest matrix holds.
    matrix = min((s for s in fitting if s[1] >= group), key=lambda s: (s[1], -s[0] * s[2]), default=None)
    matrix = matrix or max(fitting, key=lambda s: (s[1], s[0] * s[2]), default=None)
    if matrix is None or caps.max_storage_bindings < interface(SHADER).buffers:
        return None
    heads = max(d for d in range(1, min(group, matrix[1]) + 1) if group % d == 0)
    subgroups = max(1, workgroup_size(caps, choice["warps"] * caps.subgroup_size) // caps.subgroup_size)
    while subgroups > 1 and _shared_bytes(subgroups, matrix, hd) > caps.max_shared_memory:
        subgroups //= 2
    if _shared_bytes(subgroups, matrix, hd) > caps.max_shared_memory:
        return None
    return DecodeMatrixShape(heads, subgroups, matrix, lanes, choice["groups"], choice["rows_per_split"])


def _fits(matrix: tuple[int, int, int], lanes: int, hd: int, page: int, caps: Capabilities) -> bool:
    """Whether heads of hd values are whole words of lanes and whole matrices, and pages whole blocks."""
    rows, columns, depth = matrix
    groups = caps.subgroup_size // lanes
    whole = not (caps.subgroup_size % lanes or depth % lanes or rows % groups or columns % groups)
    return whole and depth // lanes in (1, 2, 4, 8) and not (hd % (4 * rows) or hd % (8 * lanes) or hd % depth or page % max(rows, depth))


def _shared_bytes(subgroups: int, matrix: tuple[int, int, int], hd: int) -> int:
    """Shared memory of the kernel."""
    rows, columns, depth = matrix
    area = columns * max(hd // 4, max(rows, depth) // 4 + 1)
    return subgroups * (16 * area + 12 * columns) + 16


def lower(problem: DecodeProblem, shape: DecodeMatrixShape, caps: Capabilities, reason: str = "") -> Dispatch:
    """The dispatch."""
    (n, n_head, hd), (n_head_kv, n_ctx, _) = problem.q.shape, problem.cache_k.shape
    max_pages = problem.paged[1].shape[1] if problem.paged else 0
    rows_in_use = max_pages * problem.page if problem.paged else n_ctx
    rows = min(rows_in_use, problem.rows_seen) if problem.rows_seen else rows_in_use
    splits = shape.splits(n_head, rows)
    tiles = n_head // shape.heads * n
    spec = matrix_spec(shape.subgroups, shape.matrix, caps) | {
        "ROW_LANES": shape.row_lanes,
        "HD": hd,
        "HEADS": shape.heads,
        "SPLITS": splits,
        "HAS_SINKS": int(problem.sinks is not None),
        "HAS_SOFTCAP": int(problem.softcap > 0.0),
        "PAGE": problem.page,
    }
    y_stride = 0
    if problem.y.type == "Q8_1":
        spec |= {"OUT_Q8_1": 1}
    if problem.units is not None:
        _, columns, depth = problem.units.matrix
        spec |= {"OUT_UNITS": 1, "OUT_FN": columns, "OUT_FK": depth}
        y_stride = units_stride(problem.y.shape[-1], problem.units, caps)
    buffers: dict[str, Arg | None] = {
        "Q": Arg(problem.q),
        "CacheK": Arg(problem.cache_k),
        "CacheV": Arg(problem.cache_v),
        "Pos": Arg(problem.pos),
        "Y": Arg(problem.y, "w"),
        "Sinks": arg_of(problem.sinks),
        "Overflow": Arg(overflow_word(queries_f16(problem.q)), "rw"),
    }
    if problem.paged:
        buffers |= {"Slots": Arg(problem.paged[0]), "Pages": Arg(problem.paged[1])}
    own: tuple[str, ...] = ()
    if splits > 1:
        own = (f"{problem.y.name}.splits",)
        part = shape.heads * hd + 4 * ceil_div(shape.heads, 2)
        buffers["Partial"] = Arg(Tensor(own[0], "F32", (tiles, splits, part)), "rw")
        buffers["Tickets"] = Arg(Tensor(f"{problem.y.name}.tickets", "I32", (tiles,), "counter"), "rw")
    return Dispatch(
        Variant.of(SHADER, spec=spec, subgroup_size=required_subgroup(caps)),
        interface(SHADER).bound(buffers, Arg(problem.q)),
        pack_push(
            n,
            n_head,
            n_head_kv,
            n_ctx,
            rows_in_use,
            problem.window,
            shape.rows_per_split,
            problem.scale * LOG2_E,
            problem.softcap * LOG2_E,
            max_pages,
            y_stride,
        ),
        (n_head // shape.heads, splits, n),
        "FLASH_ATTN_EXT",
        problem.label or problem.y.name,
        f"{reason}, by matrices: {shape.heads} heads, {shape.subgroups} subgroups, {splits} splits",
        nbytes=nbytes(problem.q) + nbytes(problem.y) + (n if problem.paged else 1) * read_bytes(problem.cache_k, problem.cache_v, rows, hd),
        flops=4 * n * n_head * rows * hd,
        waits=SpinWaits(own=own, counted=(problem.q.name, problem.cache_k.name, problem.cache_v.name), arrives=tiles, specialized=True),
    )


def prebuilt_variants() -> list[Variant]:
    """The modules that need a compiler with cooperative matrices."""
    return [Variant(SHADER)]

"""Attention of many tokens at once: the kernels of shaders/attention/prompt as pure lowering helpers.

A `PromptProblem` says what to compute, in tensors; a `PromptShape` which kernel does it and how it cuts the work; `lower` makes the
dispatch.

    matrix  cooperative matrices: f16 queries, keys, values and weights, f32 sums; where a row of K holds the row of V (MLA), by a kernel of
            its own, whose subgroups share queries
    plain   f32 throughout

Both walk the cache in blocks of rows with online softmax, as FlashAttention-2 does. A workgroup takes a tile of queries (token, head) of
one kv head, so that tokens and heads share the reads of K and V. Blocks before the first row that a query of
the tile sees and behind the last are skipped. On a GPU rows between these must hold numbers, though no token may see them: positions of a
prompt follow each other. On a CPU driver, whose tables give these kernels few tokens, too, they may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vkback.constants import LOG2_E
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.cache import CACHE_TYPES, cached_bytes
from vkback.ops.case import Tolerance
from vkback.ops.cooperative_matrix import fragments_possible, matrix_shape, matrix_spec, row_lanes
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, power_of_two, reduction, required_subgroup, workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

PromptKernel = Literal["plain", "matrix"]

OUT_TYPES = {"F32": 0, "Q8_1": 1, "F16": 2}
"""OUT_TYPE of shaders/attention/prompt/prompt_store.glsl."""

OUT_FRAGMENTS = 3

PART_VALUES = 128
"""Columns of its queries' results that a subgroup of prompt_latent.comp makes, at most: 64 registers a lane for a matrix of 16 rows."""

ROWS_OF_SHUFFLES = 32
"""Rows of a block of `plain` on a CPU driver, at most: a bit each."""

MAX_VALUES = 32
"""Values of a query, and as many of its sum, that a thread of `plain` holds on a GPU: two queries then take 128 registers."""

PARAMS: dict[str, tuple[Any, ...] | Literal["positive"]] = {
    "kernel": (
        "decode",
        "decode_matrix",
        "plain",
        "matrix",
    ),  # shaders/attention/decode/attention.comp, matrix.comp there, or which of these
    "tile_q": "positive",  # queries (token, head) of a workgroup, at most
    "tile_kv": (4, 8, 16, 32, 64, 128),  # rows of the cache in a block
    "warps": (1, 2, 4, 8, 16),  # subgroups of a workgroup
}
"""What the tables say of prompts, in family `attention`."""


@dataclass(frozen=True)
class PromptProblem:
    """Attention of n tokens.

    q      F32 [n, n_head, hd]
    cache  K F16, F32, Q8_0 or Q4_0 [n_head_kv, n_ctx, hd]; V the same with v_dim values a row, or with more, of which the first v_dim count
    pos    I32 [n], -1: padding; or I32 [n, 2], the first and the last row that each token sees
    y      F32 or Q8_1 [n, n_head * v_dim], or F16 as `gemm_pack.packed` has it
    sinks  F32 [n_head]
    fragments  an F16 y is in fragment order (`heads_of_fragments` must not be 0); else row-major
    q_pe   F32 [n, n_head, rot]: the last rot values of a head of Q, of which q then has the first hd - rot, in rows as wide as its shape
           says
    """

    q: Tensor
    cache_k: Tensor
    cache_v: Tensor
    pos: Tensor
    y: Tensor
    scale: float
    window: int = 0
    sinks: Tensor | None = None
    label: str = ""
    fragments: bool = False
    v_dim: int = 0  # 0: as wide as K
    q_pe: Tensor | None = None
    softcap: float = 0.0  # of scores, 0: none
    chunked: bool = False  # the window is one of chunks

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.cache_k.shape[0]

    @property
    def hd(self) -> int:
        return self.cache_k.shape[2]

    @property
    def spans(self) -> bool:
        return len(self.pos.shape) == 2

    @property
    def vd(self) -> int:
        return self.v_dim or self.hd

    @property
    def name(self) -> str:
        return self.label or self.y.name


@dataclass(frozen=True)
class PromptShape:
    """How attention is cut.

    tile_q   queries of a workgroup
    tile_kv  rows of the cache in a block
    warps    subgroups of a workgroup

    Of plain alone:
    lanes    threads that share a query
    use_shuffles a workgroup is one subgroup whose lanes broadcast rows to each other; else rows go through shared memory

    Of matrix alone:
    matrix     rows, columns and depth of a matrix
    row_lanes  neighbouring lanes that share a row of one, 0 where that is not known (shaders/gemm/matrix.glsl)
    parts      of rows that hold K and V: subgroups that share queries (shaders/attention/prompt/prompt_latent.comp); 0: another kernel
    """

    kernel: PromptKernel
    tile_q: int
    tile_kv: int
    warps: int
    lanes: int = 1
    use_shuffles: bool = False
    matrix: tuple[int, int, int] = (0, 0, 0)
    row_lanes: int = 0
    parts: int = 0


def shape_for(choice: Choice, hd: int, ctx: LowerContext, vd: int = 0, latent: bool = False) -> PromptShape | None:
    """The tables' choice, cut down to what the device has room for. `matrix` is `plain` where there are no matrices, and where V is neither
    as wide as K nor part of its rows. vd: width of V, 0: as K; latent: V is the first part of each row of K. None: decode."""
    vd, caps = vd or hd, ctx.caps
    if choice["kernel"] == "matrix" and (latent or vd == hd):
        shape = latent_shape(choice, hd, vd, caps, row_lanes(ctx)) if latent else matrix_kernel_shape(choice, hd, caps, row_lanes(ctx))
        if shape is not None:
            return shape
    return None if choice["kernel"] in ("decode", "decode_matrix") else plain_shape(choice, hd, caps, vd)


def plain_shape(choice: Choice, hd: int, caps: Capabilities, vd: int) -> PromptShape | None:
    """None where the device has no shuffles among eight lanes, or too little shared memory."""
    if not caps.has_subgroup_ops("arithmetic", "shuffle") or caps.subgroup_min < 8:
        return None
    sg = caps.subgroup_size
    if caps.software:
        return PromptShape("plain", sg * max(1, choice["tile_q"] // sg), min(choice["tile_kv"], ROWS_OF_SHUFFLES), 1, 1, True)
    fits = [i for i in (1, 2, 4, 8) if hd // 4 % i == 0 and vd // 4 % i == 0]
    lanes = next((i for i in fits if max(hd, vd) // i <= MAX_VALUES), fits[-1])
    threads = workgroup_size(caps, choice["warps"] * sg)
    rows = choice["tile_kv"]
    while 4 * rows * (hd + vd) > caps.max_shared_memory - 1024 and rows > 4:
        rows //= 2
    while 4 * vd * (threads // lanes) > caps.max_shared_memory - 1024 and threads > sg:
        threads //= 2
    if 4 * max(rows * (hd + vd), threads // lanes * vd) > caps.max_shared_memory - 1024:
        return None
    queries = max(1, choice["tile_q"] * lanes // threads)
    return PromptShape("plain", threads // lanes * queries, rows, threads // sg, lanes, False)


def matrix_kernel_shape(choice: Choice, hd: int, caps: Capabilities, lanes: int) -> PromptShape | None:
    """None where the device has no matrices that the kernel can use, or too little shared memory."""
    matrix = matrix_shape(caps)
    if matrix is None or not caps.has_subgroup_ops("arithmetic", "shuffle"):
        return None
    if matrix[1] != matrix[2]:
        lanes = 0
    if not lanes and not _f16_sums(matrix, caps):
        return None
    sg = caps.subgroup_size
    if sg % 8 or matrix[0] * matrix[1] % sg or matrix[1] > 32:
        return None
    warps = min(choice["warps"], workgroup_size(caps, choice["warps"] * sg) // sg)
    deep = max(1, choice["tile_q"] // (warps * matrix[0]))
    rows = max(choice["tile_kv"], matrix[1], matrix[2])
    shape = PromptShape("matrix", warps * deep * matrix[0], rows, warps, matrix=matrix, row_lanes=lanes)
    while matrix_shared(shape, hd) > caps.max_shared_memory:
        if shape.tile_kv > max(matrix[1], matrix[2]):
            shape = replace(shape, tile_kv=shape.tile_kv // 2)
        elif shape.warps > 1:
            shape = replace(shape, warps=shape.warps // 2, tile_q=shape.tile_q // 2)
        else:
            return None
    return shape


def latent_shape(choice: Choice, hd: int, vd: int, caps: Capabilities, lanes: int) -> PromptShape | None:
    """The same for rows that hold K and V. None also where it is not known which lanes share a row."""
    matrix = matrix_shape(caps)
    if matrix is None or not lanes or matrix[1] != matrix[2] or matrix[1] > 32 or not caps.has_subgroup_ops("arithmetic", "shuffle"):
        return None
    sg = caps.subgroup_size
    most = workgroup_size(caps, choice["warps"] * sg) // sg
    parts = min(most, power_of_two(ceil_div(vd, PART_VALUES)))
    groups = max(1, min(most // parts, choice["tile_q"] // matrix[0]))
    rows = max(choice["tile_kv"], matrix[1])
    shape = PromptShape("matrix", groups * matrix[0], rows, groups * parts, matrix=matrix, row_lanes=lanes, parts=parts)
    while latent_shared(shape, hd) > caps.max_shared_memory:
        if shape.tile_kv > matrix[1]:
            shape = replace(shape, tile_kv=shape.tile_kv // 2)
        elif groups > 1:
            groups //= 2
            shape = replace(shape, warps=groups * parts, tile_q=groups * matrix[0])
        else:
            return None
    return shape


def _f16_sums(matrix: tuple[int, int, int], caps: Capabilities) -> bool:
    """Whether matrices of sums may be f16, too, which weights are on their way to matrix A."""
    wanted = ("f16", "f16", "f16", "f16", "subgroup")
    return any((s.a, s.b, s.c, s.result, s.scope) == wanted and (s.m, s.n, s.k) == matrix for s in caps.cooperative_matrix_shapes)


def heads_of_fragments(shape: PromptShape, group: int, hd: int, caps: Capabilities) -> int:
    """Query heads that a tile takes where its results are stored as fragments: as many as leave whole matrices of tokens. group: those of a
    kv head. 0: head size, tile or shared memory do not allow it."""
    _, columns, depth = shape.matrix
    if shape.kernel != "matrix" or shape.parts or hd % depth or not fragments_possible(shape.matrix, caps):
        return 0
    if matrix_shared(shape, hd, fragments=True) > caps.max_shared_memory:
        return 0
    return max((h for h in range(1, group + 1) if group % h == 0 and shape.tile_q % (columns * h) == 0), default=0)


def packs(shape: PromptShape, group: int, hd: int, n_head: int, reader: GemmShape, caps: Capabilities) -> bool:
    """Whether attention can store what a GEMM of shape `reader` takes as its x."""
    if n_head * hd % UNIT:
        return False
    return not reader.fragments or (shape.matrix == reader.matrix and heads_of_fragments(shape, group, hd, caps) > 0)


def matrix_shared(shape: PromptShape, hd: int, fragments: bool = False) -> int:
    """Bytes of shared memory of shaders/attention/prompt/prompt_matrix.comp. fragments: results are stored as such."""
    fm, fn, fk = shape.matrix
    align = max(fn, fk)
    pitch = ceil_div(hd, align) * align // 8 + 1
    rows = max(2 * shape.tile_kv, shape.warps * fm) * pitch
    stages = shape.warps * fm * max(5 if fragments else 9, fn // 4 + 1) + (shape.tile_q * pitch if fragments else 0)
    if shape.row_lanes:
        return 16 * (max(rows, stages) + 1) + 8 * (shape.tile_q + 1)
    scratch = fm * max(fn // 4 + 1, shape.tile_kv // 8 + 1)
    return 16 * (max(rows, stages) + shape.warps * scratch) + 16 * shape.tile_q


def latent_shared(shape: PromptShape, hd: int) -> int:
    """Bytes of shared memory of shaders/attention/prompt/prompt_latent.comp."""
    fm, fn, fk = shape.matrix
    pitch = ceil_div(hd, fk * shape.parts) * shape.parts * fk // 8 + 1
    scores = shape.warps * fm * (shape.tile_kv // 4 + 1)
    return 16 * (max(max(shape.tile_kv, fm) * pitch, shape.warps * fm * (fn // 4 + 1)) + scores) + 8 * shape.tile_q


MATRIX_TOLERANCE = Tolerance(
    1e-6,
    1e-2,
    "queries and weights are rounded to f16, at most 2^-11 each, 2^-12 rms. A logit whose terms add up to 1 rms moves by 2^-12, "
    "its weight by as much. Both errors differ from row to row: 2 * 2^-24 = 1.2e-7 by energy, 8 times that where few rows count",
)


def tolerance(shape: PromptShape, y: Tensor) -> Tolerance:
    """How far either kernel may be from float64."""
    if y.type == "Q8_1":
        return Tolerance(1e-4, 0.1, "outputs are rounded to 8 bits: 1/254 of the largest of 32, which is up to ten times their rms")
    if shape.kernel == "matrix":
        return MATRIX_TOLERANCE
    if y.type == "F16":
        return Tolerance(2.4e-7, 5e-3, "outputs are rounded to f16, by at most 2^-11, squared 2.4e-7; the largest is 10 times the rms")
    return Tolerance(1e-10, 1e-4, "f32 sums of exact F16 products; exp2 of logits up to 20 is off by 5e-6, the worst by a few times that")


def lower(problem: PromptProblem, shape: PromptShape, caps: Capabilities, reason: str = "") -> Dispatch:
    """The dispatch. Raises PlanError for what the kernel cannot do."""
    n, n_head, vd = *problem.q.shape[:2], problem.vd
    hd = problem.hd
    n_head_kv, n_ctx, _ = problem.cache_k.shape
    if problem.y.type not in OUT_TYPES or (problem.y.type != "F32" and n_head * vd % 32) or (problem.y.type == "Q8_1" and vd % 32):
        raise PlanError(
            f"[attention] {problem.name}: {problem.y} of {n_head} heads of {vd}; expected F32, or whole units of 32 as Q8_1 or F16"
        )
    # How many heads share a tile; 0 where tiles of such heads cannot be stored as fragments.
    heads = heads_of_fragments(shape, problem.group, hd, caps) if problem.fragments else problem.group
    if not heads or (problem.fragments and problem.y.type != "F16"):
        raise PlanError(
            f"[attention] {problem.name}: {problem.y} cannot be fragments, heads being of {hd} and tiles of {shape.tile_q}; take F32"
        )
    tiles = ceil_div(n * heads, shape.tile_q)
    if tiles > MAX_GROUPS_X:
        raise PlanError(f"[attention] {problem.name}: {n} tokens of {heads} heads in tiles of {shape.tile_q}; take fewer tokens at a time")
    # A window reads its own rows and those of the tokens themselves.
    rows = min(n_ctx, problem.window + n) if problem.window else n_ctx
    y_stride = problem.y.shape[-1] // 8 if problem.y.type == "F16" else 0
    if problem.fragments:
        y_stride = problem.y.shape[-1] // shape.matrix[2] * caps.subgroup_size
    if shape.parts and problem.y.type != "F32":
        raise PlanError(f"[attention] {problem.name}: {problem.y}; of rows that hold K and V the kernel by matrices makes F32")
    overflow = [Arg(overflow_word(queries_f16(problem.q)), "rw")] if shape.kernel == "matrix" else []
    # Unused bindings still need a buffer; q stands in.
    q_pe = [Arg(problem.q_pe or problem.q)] if problem.q_pe or shape.parts else []
    kernels = plain_kernel if shape.kernel == "plain" else latent_kernel if shape.parts else matrix_kernel
    return Dispatch(
        kernel=kernels(problem, shape, caps),
        args=(
            Arg(problem.q),
            Arg(problem.cache_k),
            Arg(problem.cache_v),
            Arg(problem.pos),
            Arg(problem.y, "w"),
            Arg(problem.sinks or problem.q),
            *q_pe,
            *overflow,
        ),
        push=pack_push(
            n, n_head, n_head_kv, n_ctx, problem.window | problem.chunked << 31, y_stride, problem.scale * LOG2_E, problem.softcap * LOG2_E
        ),
        groups=(tiles, n_head // heads, 1),
        op="FLASH_ATTN_EXT",
        label=problem.name,
        reason=f"{reason}, {shape.kernel}: tiles of {shape.tile_q} queries x {shape.tile_kv} rows, {shape.warps} subgroups"
        + (f", stored as f16 {'fragments' if problem.fragments else 'rows'}" if problem.y.type == "F16" else ""),
        nbytes=nbytes(problem.q) + nbytes(problem.y) + read_bytes(problem.cache_k, problem.cache_v, rows, vd),
        flops=2 * n * n_head * (min(n_ctx, problem.window) if problem.window else n_ctx) * (hd + vd),
    )


def read_bytes(cache_k: Tensor, cache_v: Tensor, rows: int, vd: int) -> int:
    """Of so many rows of each kv head, whose V has vd values; V may be in K's rows."""
    of_v = cached_bytes(cache_v.type, vd) if cache_k.name != cache_v.name else 0
    return cache_k.shape[0] * rows * (cached_bytes(cache_k.type, cache_k.shape[2]) + of_v)


def split_q(q: Tensor, q_pe: Tensor | None, hd: int) -> Defines:
    """Defines of a Q in two tensors."""
    return {"SPLIT_Q": 0} if q_pe is None else {"SPLIT_Q": 1, "NOPE": hd - q_pe.shape[-1], "Q_PITCH": q.shape[-1]}


def queries_f16(q: Tensor) -> Tensor:
    """The scaled queries as `matrix` packs them, in registers only."""
    return Tensor(f"{q.name}.q_f16", "F16", q.shape)


def plain_kernel(problem: PromptProblem, shape: PromptShape, caps: Capabilities) -> Variant:
    """shaders/attention/prompt/prompt.comp."""
    wg = shape.warps * caps.subgroup_size
    reduce, subgroup = reduction(caps, wg, lanes=8)
    defines: Defines = {
        **reduce,
        "HD": problem.hd,
        "VD": problem.vd,
        "V_PITCH": problem.cache_v.shape[2] // 8,
        "K_TYPE": CACHE_TYPES[problem.cache_k.type],
        "V_TYPE": CACHE_TYPES[problem.cache_v.type],
        **split_q(problem.q, problem.q_pe, problem.hd),
        "LANES": shape.lanes,
        "QUERIES": shape.tile_q * shape.lanes // wg,
        "ROWS": shape.tile_kv,
        "USE_SHUFFLES": int(shape.use_shuffles),
        "OUT_TYPE": f"{OUT_TYPES[problem.y.type]}u",
        "HAS_SINKS": int(problem.sinks is not None),
        "HAS_SOFTCAP": int(problem.softcap > 0.0),
        "SPANS": int(problem.spans),
    }
    return Variant.of("attention/prompt/prompt.comp", defines, subgroup_size=subgroup)


def matrix_kernel(problem: PromptProblem, shape: PromptShape, caps: Capabilities) -> Variant:
    """shaders/attention/prompt/prompt_matrix.comp."""
    matrix_rows = shape.tile_q // shape.warps // shape.matrix[0]
    spec = matrix_spec(shape.warps, shape.matrix, caps) | {
        "HD": problem.hd,
        "ROWS": shape.tile_kv,
        "MQ": matrix_rows,
        "OUT_TYPE": OUT_FRAGMENTS if problem.fragments else OUT_TYPES[problem.y.type],
        "HAS_SINKS": int(problem.sinks is not None),
        "ROW_LANES": shape.row_lanes,
        "K_TYPE": CACHE_TYPES[problem.cache_k.type],
        "V_TYPE": CACHE_TYPES[problem.cache_v.type],
        "HAS_SOFTCAP": int(problem.softcap > 0.0),
        "SPANS": int(problem.spans),
    }
    return Variant.of("attention/prompt/prompt_matrix.comp", spec=spec, subgroup_size=required_subgroup(caps))


def latent_kernel(problem: PromptProblem, shape: PromptShape, caps: Capabilities) -> Variant:
    """shaders/attention/prompt/prompt_latent.comp."""
    rot = problem.q_pe.shape[-1] if problem.q_pe else 0
    spec = matrix_spec(shape.warps, shape.matrix, caps) | {
        "HD": problem.hd,
        "VD": problem.vd,
        "ROWS": shape.tile_kv,
        "PARTS": shape.parts,
        "HAS_SINKS": int(problem.sinks is not None),
        "ROW_LANES": shape.row_lanes,
        "SPLIT_Q": int(problem.q_pe is not None),
        "NOPE": problem.hd - rot,
        "Q_PITCH": problem.q.shape[-1],
        "K_TYPE": CACHE_TYPES[problem.cache_k.type],
        "SPANS": int(problem.spans),
    }
    return Variant.of("attention/prompt/prompt_latent.comp", spec=spec, subgroup_size=required_subgroup(caps))


def prebuilt_variants() -> list[Variant]:
    """The modules that need a compiler with cooperative matrices."""
    return [Variant("attention/prompt/prompt_matrix.comp"), Variant("attention/prompt/prompt_latent.comp")]

"""Products of a stored weight and many tokens: the kernels of shaders/mat_mul as pure lowering helpers.

A `MatMul` says what to compute, in tensors; a `MatMulShape` which kernel does it and how it cuts the work; `lower` makes the dispatches.
Nothing here chooses a shape from tables or takes part in fusion.

Four ways:

    coop_mat  cooperative matrices of f16 with f32 sums; x comes packed (`pack_f16`)
    coop_reg  the same for few tokens (vkback/ops/mat_mul_reg.py)
    int_dot   packed integer dot products; x is Q8_1
    f32       plain f32; x is F32

A product of experts (MUL_MAT_ID) is a grouped one: `route` puts the slots in the order of their experts, and every column tile has slots
of one expert. A slot is one used expert of one token; slot s belongs to token s // used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import Literal

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.code_books import CODED, decoder
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.f16_range import overflow_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import Shard, nbytes, shards, weight_push
from vkback.ops.workgroup import Defines, reduction
from vkback.shader import Variant

Way = Literal["coop_mat", "coop_reg", "int_dot", "f32"]

UNIT = quants.UNIT
GLU_KINDS = {"": 0, "silu": 1, "oai": 2, "gelu": 3}
"""GLU of shaders/mat_mul/glu.glsl by name."""


@dataclass(frozen=True)
class MatMulShape:
    """How a product is cut.

    way      which kernel
    tile_m   weight rows of a workgroup's tile
    tile_n   columns (tokens, slots) of the tile
    step_k   weights of a row between two barriers; kernels without shared memory take a unit at a time
    warps    subgroups of a workgroup
    split_k  parts of a row, each by workgroups of its own and added up at the end

    Of coop_mat alone:
    warp_m, warp_n  the part of the tile that one subgroup makes; warps = tile_m / warp_m * tile_n / warp_n
    matrix          rows, columns and depth of a matrix
    fragments       x is packed in fragment order and goes straight into matrices; else it is row-major and goes through shared memory

    Of coop_reg, with warp_m and matrix as above:
    slice_k    subgroups that share the rows of a part and take turns along K; warps = tile_m / warp_m * slice_k
    row_lanes  neighbouring lanes that share a row of a matrix
    """

    way: Way
    tile_m: int
    tile_n: int
    step_k: int = UNIT
    warps: int = 1
    split_k: int = 1
    warp_m: int = 0
    warp_n: int = 0
    matrix: tuple[int, int, int] = (0, 0, 0)
    fragments: bool = False
    slice_k: int = 1
    row_lanes: int = 0


@dataclass(frozen=True)
class Heads:
    """Where a product (coop_reg) stores heads of Q, K and V, those of Q and K turned (mode "normal").

    q        F32 [n, n_head, head_dim]
    caches   of K and V, F16 [n_head_kv, n_ctx, head_dim]
    pos      I32 [n]: positions of the tokens; -1, or one outside the caches, stores nothing
    angles   F32 [n, pairs, 2], as ROPE_ANGLES makes them; None: nothing is turned
    """

    q: Tensor
    caches: tuple[Tensor, Tensor]
    pos: Tensor
    angles: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.caches[0].shape[-1]

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V among all heads."""
        kv = self.caches[0].shape[0] * self.head_dim
        return prod(self.q.shape[1:]), kv, kv

    @property
    def pairs(self) -> int:
        """Pairs of a head that are turned."""
        return self.angles.shape[-2] if self.angles is not None else 0


@dataclass(frozen=True)
class MatMul:
    """y = x w^T, or with `turned` y = x w, and what is done to it before it is stored.

    w         weight [m, k], or [n_expert, m, k] with a route; turned: [k, m]
    x         F32 or Q8_1 [rows, k], or F16 as `packed` has it; with a route a row a token (x_shared slots share it) or a row a slot
              (x_shared 1)
    y         F32 or Q8_1 [n, rows_total], or F16 as `packed` has it; rows y_row0.. are this product's
    n         columns: tokens, or with a route slots
    bias      F32 [m], or of all experts end to end
    residual  F32, shape of y
    route     what `route` makes of the ids of the slots
    x_scale   what an F16 x was multiplied by, and out_scale what an F16 y will be, so that all values stay within 65504
    x_factors  F32 [n], coop_mat alone: what each column of y is multiplied by, as `pack_f16` stored it; then there is no bias
    glu       "": none. Rows of w alternate gate and up: "silu": silu(gate) * up; "gelu": gelu(gate) * up; "oai": the clamped form
              of the first with alpha and limit

    Of coop_reg alone, where what is normed is made and read by products:
    units         a further output: y in unit order, each row times its weight units_norm F32 [m]
    squares_made  a further output, F32 [n, parts]: sums of squares of each column of y
    squares       such sums of x, whose columns are then divided by their rms, with eps
    heads         its rows are heads, and go where this says; y is then nobody's, and y_row0 the first row among those of all heads
    """

    w: Tensor
    x: Tensor
    y: Tensor
    n: int
    bias: Tensor | None = None
    residual: Tensor | None = None
    route: Tensor | None = None
    x_shared: int = 1
    glu: Literal["", "silu", "oai", "gelu"] = ""
    alpha: float = 0.0
    limit: float = 0.0
    y_row0: int = 0
    x_scale: float = 1.0
    out_scale: float = 1.0
    label: str = ""
    x_factors: Tensor | None = None
    turned: bool = False
    units: Tensor | None = None
    units_norm: Tensor | None = None
    squares_made: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    heads: Heads | None = None

    def __post_init__(self) -> None:
        """Raises PlanError where a GLU has a gate too many."""
        if self.glu and self.m % 2:
            raise PlanError(f"[mat_mul] {self.name}: rows of {self.w} should alternate gate and up, but they are odd in number")

    @property
    def m(self) -> int:
        """Values of a row of y: weight rows of the matrix, or of one expert; turned: values of a weight row."""
        return self.w.shape[-1] if self.turned else self.w.shape[-2]

    @property
    def k(self) -> int:
        """Terms of a sum."""
        return self.w.shape[-2] if self.turned else self.w.shape[-1]

    @property
    def name(self) -> str:
        return self.label or self.y.name

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def most_tiles(slots: int, experts: int, tile_n: int) -> int:
    """Column tiles that slots of so many experts can fill: a full one for each tile_n slots, and one not full for each expert that has
    any."""
    return slots // tile_n + min(experts, slots)


def route_tensor(name: str, slots: int, experts: int, tile_n: int) -> Tensor:
    """Where a route goes (shaders/mat_mul/route.comp)."""
    return Tensor(name, "I32", (4 * most_tiles(slots, experts, tile_n) + slots,))


def route(ids: Tensor, out: Tensor, experts: int, tile_n: int, caps: Capabilities) -> Dispatch:
    """The dispatch that makes the route of ids I32 [n, used] in `out` (see `route_tensor`), for products whose tiles have tile_n
    columns."""
    slots = ids.elements
    wg = min(256, caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    defines: Defines = {"WG": wg, "EXPERTS": experts, "TILE_N": tile_n}
    return Dispatch(
        Variant("mat_mul/route.comp", tuple(sorted(defines.items()))),
        (Arg(ids), Arg(out, "w")),
        pack_push(slots, most_tiles(slots, experts, tile_n)),
        (1, 1, 1),
        "ROUTE",
        out.name,
        f"{wg} threads",
        nbytes=nbytes(ids) + nbytes(out),
    )


def route_heads(tokens: int, heads: int, out: Tensor, tile_n: int, caps: Capabilities) -> Dispatch:
    """The dispatch that makes the route of a product by heads: slot t * heads + h is head h of token t."""
    wg = min(256, caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    slots = tokens * heads
    return Dispatch(
        Variant("mat_mul/route_heads.comp", (("WG", wg),)),
        (Arg(out, "w"),),
        pack_push(tokens, heads, tile_n, most_tiles(slots, heads, tile_n)),
        spread(ceil_div(slots, wg)),
        "ROUTE",
        out.name,
        f"{wg} threads",
        nbytes=nbytes(out),
    )


def lanes_for(caps: Capabilities) -> tuple[int, int | None, int]:
    """(subgroup size to count on, size to require, BY_LANES) of the kernels without shared memory (shaders/mat_mul/rows.glsl).

    Activations go from lane to lane where the device is a CPU: its loads take an instruction for every lane, its shuffles one for all.
    Narrower subgroups than eight count as eight: so many threads make a unit of Q8_1, which must lie within a workgroup.
    """
    if caps.software and caps.subgroup_size >= 8 and caps.has_subgroup_ops("shuffle"):
        if caps.subgroup_required_size:
            return caps.subgroup_size, caps.subgroup_size, 1
        if caps.subgroup_min == caps.subgroup_max:
            return caps.subgroup_size, None, 1
    return max(caps.subgroup_size, 8), None, 0


def default_shape(way: Way, n: int, caps: Capabilities) -> MatMulShape:
    """A shape that works everywhere, for tests and until tables have been measured."""
    lanes = lanes_for(caps)[0]
    if way == "coop_mat":
        matrix = matrix_shape(caps)
        if matrix is None:
            raise PlanError(f"[mat_mul] {caps.name} has no cooperative matrices of f16 with f32 sums for subgroups")
        rows, columns, depth = matrix
        fragments = fragments_possible(matrix, caps)
        if caps.software:  # small parts: such a driver takes long to compile large ones
            return MatMulShape(way, 8 * rows, 2 * columns, UNIT, 4, 1, 2 * rows, 2 * columns, matrix, fragments)
        return MatMulShape(way, 8 * rows, 8 * columns, max(2 * UNIT, depth), 4, 1, 4 * rows, 4 * columns, matrix, fragments)
    warps = 1 if caps.software else max(1, 128 // lanes)
    return MatMulShape(way, tile_m=warps * lanes * 4, tile_n=16 if n > 8 else 8, warps=warps)


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


def lower(job: MatMul, shape: MatMulShape, caps: Capabilities) -> list[Dispatch]:
    """The dispatches of a product, one a shard of its weight, with split-K two. Raises PlanError for what the kernel cannot do."""
    check(job, shape, caps)
    if shape.way != "coop_mat":
        return [_by_rows(job, shape, caps, i, shard) for i, shard in enumerate(shards(job.w, caps))]
    found: list[Dispatch] = []
    for i, shard in enumerate(shards(job.w, caps)):
        found += _by_matrices(job, shape, caps, i, shard)
    return found


def check(job: MatMul, shape: MatMulShape, caps: Capabilities) -> None:
    """Raises PlanError, with what to do instead, where kernel, product and device do not fit together."""
    if shape.way != "coop_mat" and (job.turned or job.x_factors is not None):
        raise PlanError(f"[mat_mul] {job.name}: only coop_mat reads weights the other way round, or has factors of columns")
    wanted = {"int_dot": "Q8_1", "f32": "F32", "coop_mat": "F16", "coop_reg": "F16"}[shape.way]
    if job.x.type != wanted:
        raise PlanError(f"[mat_mul] {job.name}: {shape.way} takes x as {wanted}, got {job.x}; convert it first")
    if shape.way == "coop_mat":
        return _check_matrices(job, shape, caps)
    if job.x.shape[-1] != job.k:
        raise PlanError(f"[mat_mul] {job.name}: {job.w} takes rows of {job.k} values, got {job.x}")
    if shape.way == "int_dot" and (job.w.type in ("F32", "F16", "BF16") or not caps.int_dot):
        raise PlanError(f"[mat_mul] {job.name}: no integer dot products of {job.w.type} on {caps.name}; take f32")
    threads = shape.warps * lanes_for(caps)[0]
    if shape.tile_m % threads:
        raise PlanError(f"[mat_mul] {job.name}: {shape.tile_m} rows of a tile are no multiple of its {threads} threads")
    if job.y.type == "Q8_1" and shape.tile_m // threads != (8 if job.glu else 4):
        raise PlanError(f"[mat_mul] {job.name}: a Q8_1 output takes 4 rows a thread, 8 with GLU, got {shape.tile_m // threads}")
    if job.y.type == "F16" or shape.split_k > 1:
        raise PlanError(f"[mat_mul] {job.name}: F16 outputs and split-K are for coop_mat, not {shape.way}")


def _check_matrices(job: MatMul, shape: MatMulShape, caps: Capabilities) -> None:
    rows, columns, depth = shape.matrix
    cut = f"tiles of {shape.tile_m} x {shape.tile_n}, parts of {shape.warp_m} x {shape.warp_n}, matrices {rows}x{columns}x{depth}"
    glu = int(job.glu != "")
    wrong = [
        text
        for text, there in (
            (f"x {job.x} does not hold rows of {job.k} values", job.x.shape[-1] != ceil_div(job.k, UNIT) * UNIT),
            ("parts are no multiples of matrices", shape.warp_m % rows or shape.warp_n % columns),
            ("tiles are no multiples of parts", shape.tile_m % shape.warp_m or shape.tile_n % shape.warp_n),
            (f"{shape.warps} subgroups do not make a tile", shape.warps * shape.warp_m * shape.warp_n != shape.tile_m * shape.tile_n),
            (f"steps of {shape.step_k} along K", shape.step_k % UNIT or shape.step_k % depth),
            ("no fragments with such matrices", shape.fragments and not fragments_possible(shape.matrix, caps)),
            ("split-K makes F32 of a dense product", shape.split_k > 1 and (job.y.type != "F32" or job.route is not None)),
            ("a tile of an F16 output has whole units", job.y.type == "F16" and (shape.tile_m >> glu) % UNIT),
            ("a part of an F16 output has whole matrices", job.y.type == "F16" and (shape.warp_m >> glu) % depth),
            ("Q8_1 outputs are for int_dot", job.y.type == "Q8_1"),
            ("factors of columns stand where a bias would", job.x_factors is not None and (job.bias is not None or job.route is not None)),
            ("turned, a tile has whole units of a dense weight in one shard, and makes F32", job.turned and not _turns(job, shape, caps)),
        )
        if there
    ]
    if wrong:
        raise PlanError(f"[mat_mul] {job.name}: coop_mat with {cut}: {'; '.join(wrong)}")


def _turns(job: MatMul, shape: MatMulShape, caps: Capabilities) -> bool:
    """Whether coop_mat can multiply by a weight the other way round."""
    plain = job.y.type == "F32" and job.route is None and not job.glu and job.y_row0 == 0 and len(job.w.shape) == 2
    return plain and shape.tile_m % UNIT == 0 and len(shards(job.w, caps)) == 1


def packs_glu(shape: MatMulShape, glu: bool, k: int) -> bool:
    """Whether a product of rows of k weights can leave its output packed: whole sums, whole units of a tile and matrices of a part."""
    whole = min(shape.split_k, ceil_div(k, UNIT)) == 1
    return shape.way == "coop_mat" and whole and not ((shape.tile_m >> glu) % UNIT or (shape.warp_m >> glu) % shape.matrix[2])


def packed_columns(n: int, shape: MatMulShape, experts: int = 0) -> int:
    """Columns that a packed tensor has room for: whole tiles; experts: of a grouped product, 0 of a dense one."""
    tiles = most_tiles(n, experts, shape.tile_n) if experts else ceil_div(n, shape.tile_n)
    return tiles * shape.tile_n


def packed(name: str, n: int, k: int, shape: MatMulShape, experts: int = 0) -> Tensor:
    """Activations as coop_mat takes them (shaders/mat_mul/matrix.glsl): F16, K filled up to units, columns to whole tiles."""
    return Tensor(name, "F16", (packed_columns(n, shape, experts), ceil_div(k, UNIT) * UNIT))


def order_word(shape: MatMulShape) -> str:
    """How packed values lie, in words."""
    return "fragments" if shape.fragments else "rows"


def packed_stride(k: int, shape: MatMulShape, caps: Capabilities) -> int:
    """16-byte words of a column of such a tensor, or in fragment order of a column of matrices."""
    units = ceil_div(k, UNIT)
    return units * (UNIT // shape.matrix[2]) * caps.subgroup_size if shape.fragments else units * UNIT // 8


def matrix_spec(shape: MatMulShape, caps: Capabilities) -> tuple[tuple[int, int], ...]:
    """Specialization constants 0 to 4 of shaders/mat_mul/matrix.glsl."""
    return tuple(enumerate((shape.warps * caps.subgroup_size, caps.subgroup_size, *shape.matrix)))


def pack_f16(
    x: Tensor, y: Tensor, n: int, shape: MatMulShape, caps: Capabilities, *, norm: Tensor | None = None, eps: float | None = None,
    routes: Tensor | None = None, x_shared: int = 1, scale: float = 1.0, factors: Tensor | None = None, stores_factors: bool = False,
    by_rows: bool = False,
) -> Dispatch:  # fmt: skip
    """The dispatch that makes `y` (see `packed`) of x F32 [rows, k].

    n        columns: tokens, or with a route slots
    eps      given: every row is RMS-normed first, and multiplied by `norm` F32 [k] if there is one
    routes   of a grouped product: columns are the places of its tiles
    factors  F32 [rows], with eps: 1 / rms of each row; stored here for others (stores_factors), or as another launch has stored them
    by_rows  each row is multiplied by a power of two of its own, which brings its largest value to 2^13 or just above; what undoes it is
             stored in `factors`. There is no norm then
    """
    k = x.shape[-1]
    sums = by_rows or (eps is not None and (factors is None or stores_factors))  # adds up squares, or looks for the largest value
    warps = pack_warps(shape, caps, sums)
    threads = dataclasses.replace(shape, warps=warps)
    norms = 3 if by_rows else 0 if eps is None else 1 if norm is None else 2
    spec = (
        *matrix_spec(threads, caps)[: 5 if shape.fragments else 2], (5, norms), (6, int(routes is not None)),
        (7, shape.tile_n if routes is not None else 1), (8, 0 if factors is None or by_rows else 1 if stores_factors else 2),
    )  # fmt: skip
    columns = shape.matrix[1] if shape.fragments else warps
    rooms = y.shape[0]
    groups = ceil_div(rooms if routes is not None else n, columns)
    grid_y = ceil_div(groups, MAX_GROUPS_X)
    turns = ceil_div(y.shape[1], 64 * warps) if shape.fragments else 1
    if sums:  # each workgroup of a group adds up its squares anew
        turns = min(turns, max(1, NORM_GROUPS // groups))
    return Dispatch(
        Variant("mat_mul/pack_f16.comp", (("FRAGMENTS", int(shape.fragments)),), required_subgroup(caps), spec),
        (
            Arg(x), Arg(y, "w"), Arg(norm or x), Arg(routes or x),
            Arg(factors or x, "w" if factors and (stores_factors or by_rows) else "r"), Arg(overflow_word(y), "rw"),
        ),
        pack_push(n, k, packed_stride(k, shape, caps), rooms // shape.tile_n, x_shared, float(scale), float(eps or 0.0)),
        (ceil_div(groups, grid_y), grid_y, turns),
        "PACK_F16",
        y.name,
        f"f16 {order_word(shape)}{', after RMS norm' if eps is not None else ', rows by powers of two' if by_rows else ''}",
        nbytes=nbytes(x) + 2 * n * y.shape[1],
        flops=4 * x.elements,
    )


NORM_GROUPS = 128
"""Workgroups wanted of a packing that norms: about as many as large GPUs have multiprocessors."""


def pack_warps(shape: MatMulShape, caps: Capabilities, sums: bool) -> int:
    """Subgroups of a workgroup of shaders/mat_mul/pack_f16.comp. sums: it adds up squares of rows, and more loads on their way help."""
    for warps in (16, 8) if sums else (8,):
        staged = 16 * warps * shape.matrix[1] * 9 + 4 * shape.matrix[1] if shape.fragments else 0
        if warps * caps.subgroup_size <= caps.max_workgroup_invocations and staged <= caps.max_shared_memory:
            return warps
    return 4


def required_subgroup(caps: Capabilities) -> int | None:
    """The subgroup size to require: the device's own, where it could choose another."""
    return caps.subgroup_size if caps.subgroup_required_size else None


def _coop_spec(job: MatMul, shape: MatMulShape, y_type: int, caps: Capabilities) -> tuple[tuple[int, int], ...]:
    """Specialization constants of shaders/mat_mul/coop_mat.comp."""
    return matrix_spec(shape, caps) + tuple(
        enumerate(
            (
                shape.tile_m, shape.tile_n, shape.warp_m, shape.warp_n, shape.step_k, int(shape.fragments), int(job.route is not None),
                int(job.bias is not None), int(job.residual is not None), GLU_KINDS[job.glu], y_type,
                float_bits(job.alpha), float_bits(job.limit), int(job.turned), int(job.x_factors is not None),
            ),
            5,
        )
    )  # fmt: skip


def _by_matrices(job: MatMul, shape: MatMulShape, caps: Capabilities, index: int, shard: Shard) -> list[Dispatch]:
    """A dispatch of shaders/mat_mul/coop_mat.comp, and with split-K one that adds up the parts."""
    rows = job.m if job.route is not None or job.turned else shard.rows
    split = min(shape.split_k, ceil_div(job.k, UNIT))
    shape = dataclasses.replace(shape, split_k=split)
    glu = job.glu != ""
    target, y_stride, y_type = job.y, job.y.shape[-1], 0
    if job.y.type == "F16":
        y_stride, y_type = packed_stride(job.y.shape[-1], shape, caps), 2 if shape.fragments else 1
    making, row0 = job, job.y_row0
    if split > 1:
        target, y_stride, y_type = Tensor(f"{job.name}.parts{job.y_row0 + shard.row0}", "F32", (split, job.n, rows)), rows, 3
        making, row0 = dataclasses.replace(job, bias=None, residual=None, glu="", y_row0=0), 0
    spec = _coop_spec(making, shape, y_type, caps)
    pieces = shards(job.w, caps)
    whole = len(pieces) == 1 and (job.y.type == "F16" or job.y.shape[-1] == job.m >> glu)
    part = "" if whole or split > 1 else f"rows {row0} {shard.row0}"
    alone = dataclasses.replace(shard, row0=0) if split > 1 else shard  # parts have this shard's rows alone
    push = push_words(making, shape, alone, packed_stride(job.k, shape, caps), y_stride)
    overflow = Arg(overflow_word(target), "rw", part=part) if target.type == "F16" else Arg(job.w, "r", index)
    product = Dispatch(
        Variant("mat_mul/coop_mat.comp", tuple(sorted(decoder(job.w.type, caps).items())), required_subgroup(caps), spec),
        (*bindings(making, index, target, part), overflow),
        push,
        grid(job, shape, shard),
        "MUL_MAT" if job.route is None else "MUL_MAT_ID",
        job.name,
        f"coop_mat{', weights turned' if job.turned else ''}: tiles of {shape.tile_m} x {shape.tile_n} x {shape.step_k}, {shape.warps} "
        f"subgroups, {split} parts"
        + (f", stored as f16 {order_word(shape)}" if job.y.type == "F16" else ""),
        nbytes=weight_bytes(job, shard) + nbytes(job.x) + nbytes(job.y),
        weight_bytes=weight_bytes(job, shard),
        flops=job.flops * shard.rows // prod(job.w.shape[:-1]),
    )
    if split == 1:
        return [product]
    wg = min(256, caps.max_workgroup_invocations)
    aligned = not any(size % 4 for size in (rows, job.y.shape[-1], job.y_row0 + (shard.row0 >> glu)))
    quads = aligned and job.bias is None and not glu
    threads = rows // 4 if quads else rows >> glu
    defines: Defines = {**epilogue_defines(job), "WG": wg, "PARTS": split, "QUADS": int(quads)}
    unused = Arg(target)
    return [
        product,
        Dispatch(
            Variant("mat_mul/split_sum.comp", tuple(sorted(defines.items()))),
            (unused, Arg(job.y, "w", part="" if whole else f"rows {job.y_row0} {shard.row0}"),
             *(Arg(t) if t is not None else unused for t in (job.bias, job.residual))),
            pack_push(rows, job.n, job.y.shape[-1], job.y_row0 + (shard.row0 >> glu), shard.row0),
            (ceil_div(threads, wg), job.n, 1),
            "MUL_MAT",
            f"{job.name} parts",
            f"{split} parts",
            nbytes=nbytes(target) + nbytes(job.y),
            flops=split * rows * job.n,
        ),
    ]  # fmt: skip


def float_bits(value: float) -> int:
    return int.from_bytes(pack_push(float(value)), "little")


def epilogue_defines(job: MatMul) -> Defines:
    """What becomes of the sums."""
    return {
        "HAS_BIAS": int(job.bias is not None),
        "HAS_RESIDUAL": int(job.residual is not None),
        "GLU": GLU_KINDS[job.glu],
        "GLU_ALPHA": repr(float(job.alpha)),
        "GLU_LIMIT": repr(float(job.limit)),
    }


def column_tiles(job: MatMul, tile_n: int) -> int:
    """Column tiles of the grid."""
    return ceil_div(job.n, tile_n) if job.route is None else most_tiles(job.n, job.w.shape[0], tile_n)


def push_words(job: MatMul, shape: MatMulShape, shard: Shard, x_stride: int, y_stride: int) -> bytes:
    """The push constants of shaders/mat_mul/iface.glsl."""
    units = ceil_div(job.k, UNIT)
    grouped = job.route is not None
    return pack_push(
        *weight_push(job.w.type, shard.layout, job.w.shape[-1]),
        job.m if grouped or job.turned else shard.rows,
        job.k,
        job.n,
        column_tiles(job, shape.tile_n),
        ceil_div(units, shape.split_k),
        x_stride,
        y_stride,
        job.y_row0 + (0 if grouped else shard.row0 >> (job.glu != "")),
        0 if grouped else shard.row0,
        job.x_shared,
        1.0 / job.x_scale,
        float(job.out_scale),
    )


def grid(job: MatMul, shape: MatMulShape, shard: Shard) -> tuple[int, int, int]:
    """Workgroups: row tiles times column tiles, spread over x and y, and the parts of a split-K product along z."""
    rows = job.m if job.route is not None or job.turned else shard.rows
    tiles = ceil_div(rows, shape.tile_m) * column_tiles(job, shape.tile_n)
    y = ceil_div(tiles, MAX_GROUPS_X)
    return ceil_div(tiles, y), y, shape.split_k


def bindings(job: MatMul, index: int, y: Tensor, part: str) -> tuple[Arg, ...]:
    """Buffers in the order of shaders/mat_mul/iface.glsl; the weight stands in for those that are not needed."""
    none = Arg(job.w, "r", index)
    others = (Arg(t) if t is not None else none for t in (job.bias or job.x_factors, job.residual, job.route))
    return (none, Arg(job.x), Arg(y, "w", part=part), *others)


def weight_bytes(job: MatMul, shard: Shard) -> int:
    """Bytes of weights that a product must read, each once; of a stack of experts those that can be chosen."""
    whole = shard.layout.nbytes
    return whole if job.route is None else whole * min(job.n, job.w.shape[0]) // job.w.shape[0]


def _by_rows(job: MatMul, shape: MatMulShape, caps: Capabilities, index: int, shard: Shard) -> Dispatch:
    """A dispatch of shaders/mat_mul/f32.comp or int_dot.comp."""
    lanes, required, by_lanes = lanes_for(caps)
    wg = shape.warps * lanes
    q8_out = job.y.type == "Q8_1"
    defines: Defines = {
        **decoder(job.w.type, caps),
        **epilogue_defines(job),
        "WG": wg,
        "ROWS": shape.tile_m // wg,
        "COLS": shape.tile_n,
        "BY_LANES": by_lanes,
        "GROUPED": int(job.route is not None),
    }
    if shape.way == "f32":
        defines["K_TAIL"] = int(job.k % UNIT != 0)
        x_stride = job.k
    else:
        defines["Y_TYPE"] = int(q8_out)
        x_stride = quants.q8_1_stride(job.k) // 16
    if q8_out:
        sums, pinned = reduction(caps, wg, lanes=8)
        required = required or pinned
        defines |= {name: sums[name] for name in ("REDUCE_SUBGROUP", "SUBGROUP_SIZE")}
    y_stride = ceil_div(job.y.shape[-1], UNIT) if q8_out else job.y.shape[-1]
    whole = job.y.shape[-1] == job.m >> (job.glu != "") and len(shards(job.w, caps)) == 1
    return Dispatch(
        Variant(f"mat_mul/{shape.way}.comp", tuple(sorted(defines.items())), required),
        bindings(job, index, job.y, "" if whole else f"rows {job.y_row0} {shard.row0}"),
        push_words(job, shape, shard, x_stride, y_stride),
        grid(job, dataclasses.replace(shape, split_k=1), shard),
        "MUL_MAT" if job.route is None else "MUL_MAT_ID",
        job.name,
        f"{shape.way}: tiles of {shape.tile_m} x {shape.tile_n}, {wg} threads",
        nbytes=weight_bytes(job, shard) + nbytes(job.x) + nbytes(job.y),
        weight_bytes=weight_bytes(job, shard),
        flops=job.flops * shard.rows // prod(job.w.shape[:-1]),
    )


def prebuilt_variants() -> list[Variant]:
    """All modules that need a compiler with cooperative matrices, as they come with vkback (shaders/prebuilt): one for each weight type,
    the rest
    by specialization."""
    found = [Variant("mat_mul/pack_f16.comp", (("FRAGMENTS", 1),))]
    found += [Variant(source) for source in ("mat_mul/fragment_map.comp", "mat_mul/element_map.comp", "probe/matrix_rate.comp")]
    for name, kind in quants.QUANTS.items():
        if kind.planes and name != "Q8_1":
            found += [Variant(f"mat_mul/{way}.comp", tuple(sorted(gpu_decoder(name).items()))) for way in ("coop_mat", "coop_reg")]
    return found


def gpu_decoder(quant: str) -> Defines:
    """The defines of a decoder for devices other than CPUs."""
    defines: Defines = {"QUANT_FILE": f'"quant/{quant.lower()}.glsl"'}
    return defines | ({"CODE_BOOK_LITERAL": 0} if quant in CODED or quant == "IQ1_M" else {})

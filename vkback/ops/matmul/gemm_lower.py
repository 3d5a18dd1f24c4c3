"""LINEAR nodes of many tokens as GEMMs: which kernel the tables choose, and the dispatches of the node by it.

A prompt's GEMVs take many tokens at once; the kernels of shaders/gemm then read each weight once for a whole tile of tokens. What is
fused around the node is carried out by their epilogues, or by dispatches behind them: the weighted sum of experts, rounding to Q8_1.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Tolerance
from vkback.ops.codebooks import in_pairs
from vkback.ops.cooperative_matrix import fragments_possible, matrix_shape, row_lanes
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import Choice, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.gemm import lower
from vkback.ops.matmul.gemm_problem import Gemm, GemmShape, Heads, Way, default_shape
from vkback.ops.matmul.linear_node import Experts, LinearNode, Path
from vkback.ops.matmul.pack import pack_f16, packed
from vkback.ops.matmul.route import route, route_heads, route_tensor
from vkback.ops.op import OPS
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.storage import shards
from vkback.ops.view import View
from vkback.quants import UNIT

Kernel = Literal["gemv", "coop_mat", "coop_reg", "int_dot", "f32"]
"""The GEMV kernels, 16 tokens at a time; or one of the GEMMs (vkback/ops/matmul/gemm.py)."""

declare(
    "gemm",
    match={
        "matrices": (False, True),  # cooperative matrices of f16 with f32 sums, and no --act that forbids them
        "path": get_args(Path),  # how GEMVs of the type multiply
        "experts": get_args(Experts),
        "glu": (False, True),
        "n": "number",
        "quant": tuple(quants.QUANTS),
        "decoder": get_args(quants.Decoder),
        "m": "number",
        "k": "number",
    },
    params={
        "kernel": get_args(Kernel),
        "tile_m": "positive",  # weight rows of a workgroup's tile (coop_mat)
        "tile_n": "positive",  # tokens or slots of the tile
        "step_k": "positive",  # weights of a row between two barriers (coop_mat)
        "warp_m": "positive",  # the part of the tile that a subgroup makes (coop_mat)
        "warp_n": "positive",
        "split_k": "positive",  # parts of a row, added up at the end (coop_mat, dense)
        "slice_k": (1, 2, 4, 8, 12, 14, 16),  # subgroups of a workgroup that share a row (coop_reg, dense)
        "subnormals": (False, True),  # weights decoded by way of subnormal f16, where type and values allow it (coop_mat, coop_reg)
        "rows": (2, 4),  # weight rows of a thread (f32)
    },
)

F16_TOLERANCE = Tolerance(
    1e-6, 0.02, "weights and activations rounded to f16 (relative error 2^-12 in the mean square of each: NMSE 1.2e-7), sums in f32"
)


ROUTE_BYTES = 12
"""Shared memory of shaders/gemm/route.comp for each expert."""


@dataclasses.dataclass(frozen=True)
class GemmChoice:
    """What the tables say for a node. shape None: the GEMV kernels."""

    shape: GemmShape | None
    source: str

    @property
    def x_type(self) -> str:
        """What the kernel wants x as from its producer: F32 (coop_mat packs it) or Q8_1."""
        return "Q8_1" if self.shape is not None and self.shape.way == "int_dot" else "F32"


def choose(node: LinearNode, ctx: LowerContext) -> GemmChoice:
    """The kernel for a node: a GEMM where the tables say so and device and node allow it, else the GEMV kernels."""
    if ROUTE_BYTES * node.w.shape[0] > ctx.caps.max_shared_memory and node.experts != "none":
        return GemmChoice(None, f"{node.w.shape[0]} matrices, more than a route has shared memory for")
    by_heads = node.experts == "heads"
    if node.n < 2 or "norm" in node.extra or node.chosen or (by_heads and node.x.type != "F32"):
        return GemmChoice(None, "one token, or what only GEMVs have: a prologue, the choice of experts, heads of Q8_1")
    path, _ = node.path(ctx)
    matrix = matrix_shape(ctx.caps) if _matrices_allowed(node.w, ctx) else None
    choice = ctx.tuning.pick(
        "gemm",
        matrices=matrix is not None,
        path=path,
        experts=node.experts,
        glu=node.glu,
        n=node.n,
        quant=node.w.type,
        decoder=quants.quant(node.w.type).decoder,
        m=node.m,
        k=node.k,
    )
    kernel: Kernel = choice["kernel"]
    if kernel == "int_dot" and path == "float":
        kernel = "f32"
    if ctx.act == "q8_1" and path == "int" and kernel != "gemv":
        kernel = "int_dot"
    if kernel == "coop_reg" and ctx.act == "f16":  # it has no factors of columns
        kernel = "f32"
    if kernel == "coop_reg":
        fits = matrix is not None and node.experts == "none" and node.y.type != "Q8_1" and node.x.type != "Q8_1"
        lanes = row_lanes(ctx) if fits else 0
        shape = gemm_reg.shape_of(choice["tile_m"], choice["tile_n"], choice["warp_m"], choice["slice_k"], lanes, ctx.caps)
        if shape is not None:
            shape = dataclasses.replace(shape, subnormals=_by_subnormals(node.w, choice, ctx))
        return GemmChoice(shape, choice.source)
    if kernel == "coop_mat" and matrix is None:
        kernel = "int_dot" if path == "int" else "f32"
    if node.x.type == "F16" and kernel != "coop_mat":
        raise PlanError(f"[gemm] {node.node.name}: {choice.source} chooses {kernel}, which takes no packed {node.x}; give it F32")
    partial_q8 = node.y.type == "Q8_1" and not by_heads and node.rows_total != node.m >> node.glu
    if kernel == "gemv" or (node.x.type == "Q8_1" and kernel != "int_dot") or partial_q8:
        return GemmChoice(None, choice.source)
    if kernel != "coop_mat":
        return GemmChoice(_by_rows(kernel, node, choice["tile_n"], choice["rows"], ctx), choice.source)
    assert matrix is not None
    return GemmChoice(_by_matrices(node.w, choice, matrix, ctx, split=node.experts == "none"), choice.source)


def choose_transposed(w: Tensor, n: int, ctx: LowerContext) -> GemmChoice:
    """The kernel for gradients [n, m] times a stored weight [m, k], by the tables' rows for a weight [k, m]. Only with act "f16"; shape
    None: f32."""
    matrix = matrix_shape(ctx.caps) if ctx.act == "f16" and _matrices_allowed(w, ctx) else None
    if matrix is None or len(shards(w, ctx.caps)) > 1:
        return GemmChoice(None, "f32: --act, the weight or the device has no matrices for it")
    m, k = w.shape
    choice = ctx.tuning.pick(
        "gemm", matrices=True, path="float", experts="none", n=n, quant=w.type, decoder=quants.quant(w.type).decoder, m=k, k=m
    )
    if choice["kernel"] != "coop_mat" or choice["tile_m"] % UNIT:
        return GemmChoice(None, choice.source)
    return GemmChoice(_by_matrices(w, choice, matrix, ctx), choice.source)


def lower_transposed(
    name: str, dy: Tensor, w: Tensor, dx: Tensor, choice: GemmChoice, ctx: LowerContext, before: Tensor | None = None
) -> list[Dispatch]:
    """The dispatches of dx [n, k] = dy [n, m] w [m, k] [+ before] by matrices."""
    assert choice.shape is not None
    packing, x, factors = _packed_by_rows(dy, dy.shape[0], choice.shape, ctx)
    job = Gemm(w, x, dx, dy.shape[0], residual=before, x_factors=factors, transposed=True, label=name, pairs=_in_pairs(w, ctx))
    return [packing, *(dataclasses.replace(d, reason=f"{d.reason}: {choice.source}") for d in lower(job, choice.shape, ctx.caps))]


def _packed_by_rows(x: Tensor, n: int, shape: GemmShape, ctx: LowerContext) -> tuple[Dispatch, Tensor, Tensor]:
    """Packing of x [n, k], each row times a power of two of its own: the dispatch, what it makes, and the factors that undo it."""
    out = packed(f"{x.name}.x_f16", n, x.shape[-1], shape)
    factors = Tensor(f"{x.name}.x_factors", "F32", (n,))
    return pack_f16(x, out, n, shape, ctx.caps, factors=factors, by_rows=True), out, factors


def _matrices_allowed(w: Tensor, ctx: LowerContext) -> bool:
    """Whether a weight may become f16. Of what the device made, nobody knows whether it fits; in training, F32 weights are adapters."""
    fits = w.name not in ctx.beyond_f16 and (w.kind == "weight" or w.type not in ("F32", "BF16"))
    return fits and (ctx.act == "auto" or (ctx.act == "f16" and w.type != "F32"))


def _by_subnormals(w: Tensor, choice: Choice, ctx: LowerContext) -> bool:
    """Whether a weight is decoded by way of subnormal f16: where the tables say so, its type has a quantization step, and that is small."""
    return bool(choice["subnormals"]) and quants.quant(w.type).step_factor > 0 and w.name not in ctx.coarse


def _by_matrices(w: Tensor, choice: Choice, matrix: tuple[int, int, int], ctx: LowerContext, *, split: bool = True) -> GemmShape | None:
    """The shape of coop_mat that a row of the tables means."""
    subgroups = choice["tile_m"] // choice["warp_m"] * (choice["tile_n"] // choice["warp_n"])
    parts = choice["split_k"] if split else 1
    cut = (choice["tile_m"], choice["tile_n"], choice["step_k"], subgroups, parts, choice["warp_m"], choice["warp_n"])
    fragments = ctx.fragments and fragments_possible(matrix, ctx.caps)
    return _fitting(GemmShape("coop_mat", *cut, matrix, fragments, subnormals=_by_subnormals(w, choice, ctx)), ctx)


def _by_rows(way: Way, node: LinearNode, tile_n: int, f32_rows: int, ctx: LowerContext) -> GemmShape:
    """A shape of the kernels without shared memory; a Q8_1 output takes 4 rows a thread, 8 with GLU."""
    shape = default_shape(way, node.n, ctx.caps)
    rows = f32_rows if way == "f32" else 8 if node.y.type == "Q8_1" and node.glu else 4
    return dataclasses.replace(shape, tile_n=tile_n, tile_m=shape.tile_m // 4 * rows)


def shared_bytes(shape: GemmShape) -> int:
    """Shared memory of shaders/gemm/coop_mat.comp: double-buffered rows of weights, and of activations where they are no fragments."""
    pitch = 16 * (shape.step_k // 8 + 1)
    stages = 16 * shape.subgroups * shape.matrix[1] * (shape.warp_m // 4 + 1)
    return max(2 * shape.tile_m * pitch, stages) + (16 if shape.fragments else 2 * shape.tile_n * pitch)


def _fitting(shape: GemmShape, ctx: LowerContext) -> GemmShape | None:
    """The shape with steps along K as the device's shared memory allows; None where matrices, workgroup size or memory forbid it."""
    caps = ctx.caps
    rows, columns, depth = shape.matrix
    if shape.warp_m % rows or shape.warp_n % columns or UNIT % depth or shape.tile_m % shape.warp_m or shape.tile_n % shape.warp_n:
        return None
    while shared_bytes(shape) > caps.max_shared_memory and shape.step_k > UNIT:
        shape = dataclasses.replace(shape, step_k=shape.step_k // 2)
    threads = shape.subgroups * caps.subgroup_size
    fits = shared_bytes(shape) <= caps.max_shared_memory and threads <= caps.max_workgroup_invocations
    return shape if fits else None


def rounds_x(node: LinearNode, ctx: LowerContext) -> bool:
    """Whether the kernel of a node rounds an F32 x to Q8_1."""
    shape = choose(node, ctx).shape
    by_ints = node.path(ctx)[0] == "int" if shape is None else shape.way == "int_dot"
    return by_ints and node.x.type == "F32"


def x_wanted(node: Node, ctx: LowerContext) -> str:
    """F32 or Q8_1: how a LINEAR node without a prologue wants its x."""
    taken = LinearNode.of(node)
    choice = choose(taken, ctx)
    if choice.shape is None:
        return "Q8_1" if taken.path(ctx)[0] == "int" else "F32"
    return "F32" if taken.experts == "heads" else choice.x_type


def lower_node(node: LinearNode, choice: GemmChoice, ctx: LowerContext, heads: Heads | None = None) -> list[Dispatch]:
    """The dispatches of a node by a GEMM: route of the experts, x in the form that the kernel takes, the GEMM, what comes behind.

    heads  of coop_reg: the node's rows are heads, and go there
    """
    shape, name, caps = choice.shape, node.node.name, ctx.caps
    if shape is None:
        raise PlanError(f"[gemm] {name}: {choice.source} chooses the GEMV kernels")
    if node.experts == "heads":
        return _lower_heads(node, shape, choice.source, ctx)
    before: list[Dispatch] = []
    grouped = node.experts != "none"
    columns, experts = node.n * node.n_used, node.w.shape[0] if grouped else 0
    routes = node.route
    if grouped and routes is None:
        routes = route_tensor(f"{name}.route", columns, experts, shape.tile_n)
        before.append(route(node.extra["ids"], routes, experts, shape.tile_n, caps))
    factors = None
    x, x_shared = node.x, node.n_used if grouped and (len(node.x.shape) < 3 or node.x.shape[1] == 1) else 1
    if shape.way == "coop_mat" and x.type != "F16" and ctx.act == "f16" and not grouped and "bias" not in node.extra:
        packing, x, factors = _packed_by_rows(node.x, columns, shape, ctx)
        before.append(packing)
    elif shape.way == "coop_mat" and x.type != "F16":
        x = packed(f"{name}.x_f16", columns, node.k, shape, experts)
        before.append(pack_f16(node.x, x, columns, shape, caps, routes=routes, x_shared=x_shared, scale=ctx.f16_scale(x)))
    elif shape.way == "coop_reg" and x.type != "F16":
        x = gemm_reg.packed_units(f"{name}.x_f16", columns, node.k, shape)
        before.append(gemm_reg.pack_units(node.x, x, columns, shape, caps, scale=ctx.f16_scale(x)))
    elif shape.way == "int_dot" and x.type == "F32":
        x = Tensor(f"{name}.x_q8_1", "Q8_1", node.x.shape)
        before += quantize_dispatch(node.x, x, ctx)
    target, behind = _behind(node, shape, ctx)
    params = node.node.params
    clamped = node.glu and "limit" in params
    job = Gemm(
        node.w,
        x,
        target,
        columns,
        bias=node.extra.get("bias"),
        residual=node.extra.get("residual") if node.experts != "summed" else None,
        route=routes,
        x_shared=x_shared,
        glu=("oai" if clamped else "gelu" if node.gelu else "silu") if node.glu else "",
        alpha=float(params["alpha"]) if clamped else 0.0,
        limit=float(params["limit"]) if clamped else 0.0,
        y_row0=int(params.get("row0", 0)),
        x_scale=ctx.f16_scale(x),
        out_scale=ctx.f16_scale(node.units[0] if node.units else target),
        label=name,
        x_factors=factors,
        units=node.units[0] if node.units else None,
        y_squares=node.units[1] if node.units else None,
        units_norm=node.units_norm,
        squares=node.squares,
        eps=float(params["squares_eps"]) if node.squares is not None else 0.0,
        heads=heads,
        pairs=_in_pairs(node.w, ctx),
    )
    kernels = gemm_reg.lower(job, shape, caps) if shape.way == "coop_reg" else lower(job, shape, caps)
    dispatches = [dataclasses.replace(d, reason=f"{d.reason}: {choice.source}") for d in kernels]
    return [*before, *dispatches, *behind]


def _lower_heads(node: LinearNode, shape: GemmShape, source: str, ctx: LowerContext) -> list[Dispatch]:
    """The dispatches of a product by heads, every head of a token a slot: the rows of its slots lie one behind the other in x and y."""
    name, caps = node.node.name, ctx.caps
    slots, heads, width = node.n * node.n_used, node.n_used, node.x.shape[-1] // node.n_used
    routes, before = node.route, list[Dispatch]()
    if routes is None:
        routes = route_tensor(f"{name}.route", slots, heads, shape.tile_n)
        before.append(route_heads(node.n, heads, routes, shape.tile_n, caps))
    x = dataclasses.replace(node.x, shape=(slots, width))
    if node.k < width:
        part = Tensor(f"{name}.x_heads", "F32", (slots, node.k))
        view = View(0, (node.n, heads, node.k), (heads * width, width, 1))
        before += OPS["CPY"].lower(Node("CPY", (node.x,), (part,), {"view": view}), ctx)
        x = part
    if shape.way == "coop_mat":
        taken = packed(f"{name}.x_f16", slots, node.k, shape, heads)
        before.append(pack_f16(x, taken, slots, shape, caps, routes=routes, scale=ctx.f16_scale(taken)))
        x = taken
    elif shape.way == "int_dot":
        taken = Tensor(f"{name}.x_q8_1", "Q8_1", x.shape)
        before += quantize_dispatch(x, taken, ctx)
        x = taken
    plain = node.y if node.y.type == "F32" else Tensor(f"{name}.f32", "F32", node.y.shape)
    target = dataclasses.replace(plain, shape=(slots, node.m))
    job = Gemm(node.w, x, target, slots, route=routes, x_scale=ctx.f16_scale(x), label=name, pairs=_in_pairs(node.w, ctx))
    dispatches = [dataclasses.replace(d, reason=f"{d.reason}: {source}") for d in lower(job, shape, caps)]
    behind = quantize_dispatch(plain, node.y, ctx) if plain is not node.y else []
    own = {t.name: t for t in (node.x, plain)}
    return [
        dataclasses.replace(d, args=tuple(dataclasses.replace(a, tensor=own.get(a.tensor.name, a.tensor)) for a in d.args))
        for d in [*before, *dispatches, *behind]
    ]


def _in_pairs(w: Tensor, ctx: LowerContext) -> bool:
    return in_pairs(w.type, w.shape[-1], ctx.tuning)


def _behind(node: LinearNode, shape: GemmShape, ctx: LowerContext) -> tuple[Tensor, list[Dispatch]]:
    """Where the GEMM stores, and the dispatches that make the node's output of it: the sum over experts, gelu without GLU, rounding to
    Q8_1."""
    name, y = node.node.name, node.y
    activates = node.gelu and not node.glu
    rounds = y.type == "Q8_1" and (shape.way != "int_dot" or activates or node.experts == "summed")
    final = Tensor(f"{name}.f32", "F32", y.shape) if rounds else y
    behind: list[Dispatch] = []
    target = final
    if activates:
        target = Tensor(f"{name}.plain", "F32", y.shape)
        behind += OPS["GELU"].lower(Node("GELU", (target,), (final,)), ctx)
    if node.experts == "summed":
        target = Tensor(f"{name}.slots", "F32", (node.n, node.n_used, node.m >> node.glu))
        terms = [target, node.extra["expert_weights"], *([node.extra["residual"]] if "residual" in node.extra else [])]
        behind += OPS["MOE_REDUCE"].lower(Node("MOE_REDUCE", tuple(terms), (final,)), ctx)
    if final is not y:
        behind += quantize_dispatch(final, y, ctx)
    return target, behind

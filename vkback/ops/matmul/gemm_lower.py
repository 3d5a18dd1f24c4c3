"""LINEAR nodes of many tokens as GEMMs: the dispatches of a node by the kernel that was chosen (vkback/ops/matmul/choice.py).

A prompt's GEMVs take many tokens at once; the kernels of shaders/gemm then read each weight once for a whole tile of tokens. What is
fused around the node is carried out by their epilogues, or by dispatches behind them: the weighted sum of experts, rounding to Q8_1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vkback.graph import Node, Tensor
from vkback.ops.codebooks import in_pairs
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.choice import ProductChoice, TransposedChoice
from vkback.ops.matmul.gemm import lower
from vkback.ops.matmul.gemm_problem import Gemm, GemmShape, Heads
from vkback.ops.matmul.linear_node import LinearNode
from vkback.ops.matmul.pack import pack_f16, packed
from vkback.ops.matmul.route import route, route_heads, route_tensor
from vkback.ops.op import OPS
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.view import View


def lower_transposed(
    name: str, dy: Tensor, w: Tensor, dx: Tensor, choice: TransposedChoice, ctx: LowerContext, before: Tensor | None = None
) -> list[Dispatch]:
    """The dispatches of dx [n, k] = dy [n, m] w [m, k] [+ before] by matrices."""
    assert choice.shape is not None
    packing, x, factors = _packed_by_rows(dy, dy.shape[0], choice.shape, ctx)
    problem = Gemm(w, x, dx, dy.shape[0], residual=before, x_factors=factors, transposed=True, label=name, pairs=_in_pairs(w, ctx))
    return [packing, *(dataclasses.replace(d, reason=f"{d.reason}: {choice.source}") for d in lower(problem, choice.shape, ctx.caps))]


def _packed_by_rows(x: Tensor, n: int, shape: GemmShape, ctx: LowerContext) -> tuple[Dispatch, Tensor, Tensor]:
    """Packing of x [n, k], each row times a power of two of its own: the dispatch, what it makes, and the factors that undo it."""
    out = packed(f"{x.name}.x_f16", n, x.shape[-1], shape)
    factors = Tensor(f"{x.name}.x_factors", "F32", (n,))
    return pack_f16(x, out, n, shape, ctx.caps, factors=factors, by_rows=True), out, factors


def lower_node(node: LinearNode, choice: ProductChoice, ctx: LowerContext, heads: Heads | None = None) -> list[Dispatch]:
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
    # No earlier product of the same experts has made a route: make it here.
    if grouped and routes is None:
        routes = route_tensor(f"{name}.route", columns, experts, shape.tile_n)
        before.append(route(node.extra["ids"], routes, experts, shape.tile_n, caps))
    factors = None
    # Experts share a token's row of x unless x already has a row per chosen expert.
    x, x_shared = node.x, node.n_used if grouped and (len(node.x.shape) < 3 or node.x.shape[1] == 1) else 1
    if node.params.x_shared is not None:
        x_shared = node.params.x_shared
    # With act=f16 rows are scaled by powers of two, so that none overflows. Bias and experts have no factors of columns.
    if shape.kernel == "coop_mat" and x.type != "F16" and ctx.act == "f16" and not grouped and "bias" not in node.extra:
        packing, x, factors = _packed_by_rows(node.x, columns, shape, ctx)
        before.append(packing)
    # No producer has stored x as f16: pack it, in the order in which matrices are loaded.
    elif shape.kernel == "coop_mat" and x.type != "F16":
        x = packed(f"{name}.x_f16", columns, node.k, shape, experts)
        before.append(pack_f16(node.x, x, columns, shape, caps, routes=routes, x_shared=x_shared, scale=ctx.f16_scale(x)))
    elif shape.kernel == "coop_reg" and x.type != "F16":
        rows = columns // x_shared
        x = gemm_reg.packed_units(f"{name}.x_f16", rows, node.k, shape)
        before.append(gemm_reg.pack_units(node.x, x, rows, shape, caps, scale=ctx.f16_scale(x)))
    # The kernel takes int8 alone, so x is rounded here if its producer did not.
    elif shape.kernel == "int_dot" and x.type == "F32":
        x = Tensor(f"{name}.x_q8_1", "Q8_1", node.x.shape)
        before += quantize_dispatch(node.x, x, ctx)
    # What the epilogue cannot do runs behind the GEMM, which then stores to scratch memory.
    target, after = _after_gemm(node, shape, ctx)
    params = node.params
    clamped = node.glu and params.clamp
    units = node.units if node.experts != "summed" else ()  # the sum of experts leaves them
    problem = Gemm(
        node.w,
        x,
        target,
        columns,
        bias=node.extra.get("bias"),
        residual=node.extra.get("residual") if node.experts != "summed" else None,
        route=routes,
        x_shared=x_shared,
        glu=("oai" if clamped else "gelu" if node.gelu else "silu") if node.glu else "",
        alpha=float(params.clamp["alpha"]) if clamped else 0.0,
        limit=float(params.clamp["limit"]) if clamped else 0.0,
        y_row0=params.row0,
        x_scale=ctx.f16_scale(x),
        out_scale=ctx.f16_scale(units[0] if units else target),
        label=name,
        x_factors=factors,
        units=units[0] if units else None,
        y_squares=units[1] if units else None,
        units_norm=node.units_norm if units else None,
        squares=node.squares,
        eps=float(params.squares_eps),
        x_matrix_columns=params.x_matrix_columns,
        heads=heads,
        pairs=_in_pairs(node.w, ctx),
    )
    kernels = gemm_reg.lower(problem, shape, caps) if shape.kernel == "coop_reg" else lower(problem, shape, caps)
    dispatches = [dataclasses.replace(d, reason=f"{d.reason}: {choice.source}") for d in kernels]
    return [*before, *dispatches, *after]


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
    if shape.kernel == "coop_mat":
        taken = packed(f"{name}.x_f16", slots, node.k, shape, heads)
        before.append(pack_f16(x, taken, slots, shape, caps, routes=routes, scale=ctx.f16_scale(taken)))
        x = taken
    elif shape.kernel == "int_dot":
        taken = Tensor(f"{name}.x_q8_1", "Q8_1", x.shape)
        before += quantize_dispatch(x, taken, ctx)
        x = taken
    plain = node.y if node.y.type == "F32" else Tensor(f"{name}.f32", "F32", node.y.shape)
    target = dataclasses.replace(plain, shape=(slots, node.m))
    problem = Gemm(node.w, x, target, slots, route=routes, x_scale=ctx.f16_scale(x), label=name, pairs=_in_pairs(node.w, ctx))
    dispatches = [dataclasses.replace(d, reason=f"{d.reason}: {source}") for d in lower(problem, shape, caps)]
    after = quantize_dispatch(plain, node.y, ctx) if plain is not node.y else []
    own = {t.name: t for t in (node.x, plain)}
    return [
        dataclasses.replace(d, args=tuple(dataclasses.replace(a, tensor=own.get(a.tensor.name, a.tensor)) for a in d.args))
        for d in [*before, *dispatches, *after]
    ]


def _in_pairs(w: Tensor, ctx: LowerContext) -> bool:
    return in_pairs(w.type, w.shape[-1], ctx.tuning)


def _after_gemm(node: LinearNode, shape: GemmShape, ctx: LowerContext) -> tuple[Tensor, list[Dispatch]]:
    """Where the GEMM stores, and the dispatches that make the node's output of it: the sum over experts, gelu without GLU, rounding to
    Q8_1."""
    name, y = node.node.name, node.y
    activates = node.gelu and not node.glu
    rounds = y.type == "Q8_1" and (shape.kernel != "int_dot" or activates or node.experts == "summed")
    final = Tensor(f"{name}.f32", "F32", y.shape) if rounds else y
    after: list[Dispatch] = []
    target = final
    if activates:
        target = Tensor(f"{name}.plain", "F32", y.shape)
        after += OPS["GELU"].lower(Node("GELU", (target,), (final,)), ctx)
    if node.experts == "summed":
        target = Tensor(f"{name}.slots", "F32", (node.n, node.n_used, node.m >> node.glu))
        terms = [target, node.extra["expert_weights"], *([node.extra["residual"]] if "residual" in node.extra else [])]
        after += _packed_sum(node, terms, ctx) if node.units else OPS["MOE_REDUCE"].lower(Node("MOE_REDUCE", tuple(terms), (final,)), ctx)
    if final is not y:
        after += quantize_dispatch(final, y, ctx)
    return target, after


def _packed_sum(node: LinearNode, terms: Sequence[Tensor], ctx: LowerContext) -> list[Dispatch]:
    """The sum over experts, normed and packed behind that for the products that read it, too: one dispatch."""
    slots, weights, residual = terms
    (packed_sum,), shape = node.units, node.params.units_shape
    assert shape is not None
    experts = gemm_reg.ExpertSum(weights, residual, node.y)
    eps, scale = node.params.units_eps, ctx.f16_scale(packed_sum)
    return [gemm_reg.pack_units(slots, packed_sum, node.n, shape, ctx.caps, norm=node.units_norm, eps=eps, scale=scale, experts=experts)]

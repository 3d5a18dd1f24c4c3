"""PACK_F16, ROUTE and TOPK_ROUTE: what the planner puts between the ops of a prompt, so that GEMMs share what they read.

    PACK_F16  x F32 [n, k] or [n, 1 or n_used, k] [, norm F32 [k]] [, factors F32 [n]] [, route]
              -> F16, columns for coop_mat (gemm_pack.packed) or coop_reg (gemm_reg.packed_units) [, factors F32 [n]]
              params: roles (names in input order), shape (GemmShape of a GEMM that reads it), n (columns), x_shared (slots that share
              a row of x), eps (with norm). With `norm` it is RMS_NORM_MUL, too. Then `factors` are 1 / rms of each row: as an output
              for other nodes, as an input so that squares need not be added up again.
    ROUTE     ids I32 [n, n_used] -> I32 (gemm_route.route_tensor)
              params: experts, tile_n; without ids also tokens: the route of a product by heads, which are the experts
    TOPK_ROUTE  what TOPK_MOE reads -> what it makes, and the ROUTE of its ids by the same dispatch
              params: those of TOPK_MOE and of ROUTE
    NORM_ROUTE  x F32 [n, k], norm F32 [k], w F32 [n_expert, k] [, bias] [, selection_bias] -> the PACK_F16 of x behind its norm, and what
              the TOPK_ROUTE makes by the logits of a router's product of it, in one dispatch (vkback/ops/moe/norm_route.py)
              params: roles, eps, shape (as of PACK_F16), those of TOPK_ROUTE

They are no ops of a graph. A packed tensor is no value that a host could judge (its order is the driver's affair), and of a route many
orders are right: both are judged by the products that read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import ROUTE_BYTES
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import pack_units, packed_units
from vkback.ops.matmul.linear_node import inputs_by_role
from vkback.ops.matmul.pack import pack_f16, packed, packed_columns
from vkback.ops.matmul.route import max_tiles, route, route_heads, route_tensor
from vkback.ops.moe import norm_route
from vkback.ops.moe.topk import expert_choice, topk_params
from vkback.ops.op import OPS
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines
from vkback.shader import Variant


@dataclass(frozen=True)
class Norm:
    """RMS_NORM_MUL of the rows of x on the way: weight F32 [k] and eps."""

    weight: Tensor
    eps: float


def pack_node(
    name: str,
    x: Tensor,
    n: int,
    shape: GemmShape,
    *,
    columns: int = 0,
    norm: Norm | None = None,
    route: Tensor | None = None,
    experts: int = 0,
    x_shared: int = 1,
    factors: Tensor | None = None,
    stores_factors: bool = False,
) -> Node:
    """A PACK_F16 of n columns for GEMMs of this shape.

    columns  to leave room for, where another reader's tiles are larger; with a route there is room for all of its tiles
    """
    by = {"x": x, "norm": norm.weight if norm else None, "factors": None if stores_factors else factors, "route": route}
    inputs = {role: tensor for role, tensor in by.items() if tensor is not None}
    out = packed_units(name, n, x.shape[-1], shape) if shape.kernel == "coop_reg" else packed(name, n, x.shape[-1], shape, experts)
    out = Tensor(name, out.type, (max(columns, out.shape[0]), out.shape[1]))
    params = {"roles": tuple(inputs), "shape": shape, "n": n, "x_shared": x_shared, **({"eps": norm.eps} if norm else {})}
    outputs = (out, factors) if stores_factors and factors else (out,)
    return Node("PACK_F16", tuple(inputs.values()), outputs, params)


def lower_pack(node: Node, ctx: LowerContext) -> list[Dispatch]:
    by = inputs_by_role(node)
    stored = node.outputs[1] if len(node.outputs) > 1 else None
    shape: GemmShape = node.params["shape"]
    if shape.kernel == "coop_reg":
        return [
            pack_units(
                by["x"],
                node.outputs[0],
                node.params["n"],
                shape,
                ctx.caps,
                norm=by.get("norm"),
                eps=node.params.get("eps"),
                scale=ctx.f16_scale(node.outputs[0]),
            )
        ]
    return [
        pack_f16(
            by["x"],
            node.outputs[0],
            node.params["n"],
            shape,
            ctx.caps,
            norm=by.get("norm"),
            eps=node.params.get("eps"),
            routes=by.get("route"),
            x_shared=node.params["x_shared"],
            factors=stored or by.get("factors"),
            stores_factors=stored is not None,
            scale=ctx.f16_scale(node.outputs[0]),
        )
    ]


def route_node(ids: Tensor, experts: int, tile_n: int) -> Node:
    """A ROUTE for GEMMs by these experts whose tiles have tile_n columns."""
    out = route_tensor(f"{ids.name}.route{tile_n}", ids.elements, experts, tile_n)
    return Node("ROUTE", (ids,), (out,), {"experts": experts, "tile_n": tile_n})


def route_heads_node(tokens: int, heads: int, tile_n: int) -> Node:
    """A ROUTE for all GEMMs by so many heads whose tiles have tile_n columns."""
    out = route_tensor(f"heads{heads}.route{tile_n}", tokens * heads, heads, tile_n)
    return Node("ROUTE", (), (out,), {"experts": heads, "tile_n": tile_n, "tokens": tokens})


def lower_route(node: Node, ctx: LowerContext) -> list[Dispatch]:
    if not node.inputs:
        return [route_heads(node.params["tokens"], node.params["experts"], node.outputs[0], node.params["tile_n"], ctx.caps)]
    return [route(node.inputs[0], node.outputs[0], node.params["experts"], node.params["tile_n"], ctx.caps)]


def room(n: int, *shapes: GemmShape) -> int:
    """Columns that a dense packed tensor needs for whole tiles of each of these."""
    return max(packed_columns(n, shape) for shape in shapes)


def routes_too(topk: Node, ctx: LowerContext) -> bool:
    """Whether the kernel of a TOPK_MOE has room for a route: in shared memory, and two bindings."""
    logits, *bias = topk.inputs
    choice = expert_choice(topk, logits, ctx, bias=next(iter(bias), None))
    need = choice.shared_bytes + ROUTE_BYTES * choice.n_expert + 8 * ctx.caps.max_workgroup_invocations
    return need <= ctx.caps.max_shared_memory and len(topk.inputs) + 4 <= ctx.caps.max_storage_bindings


def with_route(topk: Node, route: Node) -> Node:
    """A TOPK_ROUTE in place of a TOPK_MOE and the ROUTE of its ids."""
    return Node("TOPK_ROUTE", topk.inputs, (*topk.outputs, *route.outputs), {**topk.params, **route.params})


def lower_topk_route(node: Node, ctx: LowerContext) -> list[Dispatch]:
    *chosen, routes = node.outputs
    (d,) = OPS["TOPK_MOE"].lower(Node("TOPK_MOE", node.inputs, tuple(chosen), node.params), ctx)
    experts, tile_n = node.params["experts"], node.params["tile_n"]
    defines: Defines = {**dict(d.kernel.defines), "BIND_ROUTE": len(d.args), "EXPERTS": experts, "TILE_N": tile_n}
    tickets = Tensor(f"{node.name}.tickets", "I32", (1,), "counter")
    return [
        dataclasses.replace(
            d,
            kernel=Variant.of(d.kernel.source, defines, subgroup_size=d.kernel.subgroup_size),
            args=(*d.args, Arg(routes, "w"), Arg(tickets, "rw")),
            push=d.push + pack_push(max_tiles(chosen[1].elements, experts, tile_n)),
            op=node.op,
            nbytes=d.nbytes + nbytes(routes),
        )
    ]


def with_norm(pack: Node, product: Node, topk: Node, ctx: LowerContext) -> Node | None:
    """A NORM_ROUTE in place of a PACK_F16, a router's LINEAR of what it packs, and a TOPK_ROUTE; None where one dispatch cannot do all."""
    by, of_product = inputs_by_role(pack), inputs_by_role(product)
    shape: GemmShape = pack.params["shape"]
    units_alone = shape.kernel == "coop_reg" and len(pack.outputs) == 1  # not factors, too, as GEMMs of row-major f16 have them
    alike = units_alone and set(by) == {"x", "norm"} and pack.params["n"] == by["x"].shape[0] and len(by["x"].shape) == 2
    if not alike or not set(of_product) <= {"w", "x", "bias"} or set(product.params) - {"roles", "n"} or len(of_product["w"].shape) != 2:
        return None
    inputs = {"x": by["x"], "norm": by["norm"], "w": of_product["w"], **{r: t for r, t in of_product.items() if r == "bias"}}
    inputs |= dict(zip(("selection_bias",), topk.inputs[1:], strict=False))
    params = {"roles": tuple(inputs), "eps": float(pack.params["eps"]), "shape": shape, **topk.params}
    node = Node("NORM_ROUTE", tuple(inputs.values()), (*pack.outputs, *topk.outputs), params)
    return node if norm_route.experts_each(_norm_route(node), ctx) else None


def _norm_route(node: Node) -> norm_route.NormRoute:
    by, params = inputs_by_role(node), node.params
    units, weights, ids, routes = node.outputs
    return norm_route.NormRoute(
        by["x"],
        by["norm"],
        params["eps"],
        by["w"],
        units,
        params["shape"],
        weights,
        ids,
        routes,
        params["tile_n"],
        topk_params(params),
        by.get("bias"),
        by.get("selection_bias"),
    )


def lower_norm_route(node: Node, ctx: LowerContext) -> list[Dispatch]:
    problem = _norm_route(node)
    return [norm_route.lower(problem, norm_route.experts_each(problem, ctx), ctx, node.outputs[1].name)]


LOWER: Mapping[str, Callable[[Node, LowerContext], list[Dispatch]]] = {
    "PACK_F16": lower_pack,
    "ROUTE": lower_route,
    "TOPK_ROUTE": lower_topk_route,
    "NORM_ROUTE": lower_norm_route,
}
"""How each of them is lowered."""

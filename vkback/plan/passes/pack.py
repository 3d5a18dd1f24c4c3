"""Packing: each activation of a prompt's GEMMs by matrices is packed as f16 only once, by its producer if that can do it; and all
GEMMs by the same experts share one route.

A GEMM by cooperative matrices takes x as packed f16 (`gemm_pack.packed`), by default after a PACK_F16 of its own
(`gemm_lower.lower_node`). Here, once all fusions are done, packing becomes nodes of the plan and is shared:

    GLU -> down              the epilogue of gate and up stores packed f16, if their sums are whole; by experts in the order of a route
                             that both share; for few tokens in unit order (gemm_reg)
    attention -> its output  likewise, if a tile has whole matrices of tokens
    two norms side by side -> few tokens' products   likewise
    product -> norm -> few tokens' products   the product also stores its output in unit order, and sums of its squares (gemm_reg)
    experts -> sum -> norm -> few tokens' products   the dispatch that adds the experts norms and packs their sum, too
    norm -> GEMMs         norm and packing are one PACK_F16; experts read the rows again, by their route, with the factors it stored
    anything else            one PACK_F16, shared by all GEMMs that read the tensor

The shape of matrices, and whether they are fragments, is the same for all GEMMs of a device (`choice.choose`); by experts,
producer and readers must also agree on ids and tiles. If they do not, or if something else reads the tensor, too, it stays F32 and is
packed after its producer. The nodes made here are those of vkback/ops/matmul/pack_nodes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

from vkback.graph import Node, Tensor
from vkback.ops.attention.choice import choice_of as attention_choice
from vkback.ops.dispatch import ceil_div
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import choice_of
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import packed_units
from vkback.ops.matmul.linear_node import LinearNode, inputs_by_role
from vkback.ops.matmul.pack import packed
from vkback.ops.matmul.pack_nodes import Norm, pack_node, room, route_heads_node, route_node, routes_too, with_norm, with_route
from vkback.ops.moe.topk import topk_choice
from vkback.plan.nodes import Nodes, tokens_of
from vkback.plan.passes.choose import as_stored
from vkback.plan.schedule_choice import schedule_choice
from vkback.quants import UNIT

By = Literal["producer", "gemm", "stage"]
"""Who packs: whichever producer can, each GEMM by itself, or a stage of its own."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A GEMM by matrices that reads a tensor as its x: number of its node, the node taken apart, its shape."""

    number: int
    gemv: LinearNode
    shape: GemmShape

    @property
    def order(self) -> tuple[str, int]:
        """Column order: ("", 0) dense; (route name, tile_n) grouped; ("units", matrix columns) for coop_reg, of slots ("slots", ...)."""
        if self.shape.kernel == "coop_reg":
            return "units" if self.columns == self.gemv.n else "slots", self.shape.matrix[1]
        return (self.gemv.route.name, self.shape.tile_n) if self.gemv.route else ("", 0)

    @property
    def by_experts(self) -> bool:
        """Whether it is a grouped one in registers, which looks its columns up in whatever order they are packed."""
        return self.shape.kernel == "coop_reg" and self.gemv.route is not None

    @property
    def columns(self) -> int:
        """Rows of x: tokens, or slots where experts do not share them."""
        shared = self.gemv.route is None or len(self.gemv.x.shape) < 3 or self.gemv.x.shape[1] == 1
        return self.gemv.n if shared else self.gemv.n * self.gemv.n_used

    def takes(self, shape: GemmShape) -> bool:
        """Whether it reads columns in unit order as they are packed for coop_reg of this shape."""
        mine = self.shape
        alike = mine.kernel == "coop_reg" and mine.row_lanes == shape.row_lanes and mine.matrix[2] == shape.matrix[2]
        return alike and (self.by_experts or mine.matrix == shape.matrix)

    def reading(self, x: Tensor, shape: GemmShape | None = None) -> Node:
        """The GEMM's node with a packed x. shape: of coop_reg, for which it is packed, where that may not be its own."""
        node = self.gemv.node
        inputs = tuple(x if role == "x" else t for role, t in zip(node.params["roles"], node.inputs, strict=True))
        more = {}
        if self.by_experts:
            packed_for = shape or self.shape
            more = {"x_shared": self.gemv.n * self.gemv.n_used // self.columns, "x_matrix_columns": packed_for.matrix[1]}
        return dataclasses.replace(node, inputs=inputs, params={**node.params, "n": self.gemv.n, **more})


def pack_activations(nodes: Sequence[Node], outputs: Iterable[Tensor], ctx: LowerContext) -> Nodes:
    """The nodes with routes and packed activations; a plan without GEMMs does not change."""
    if tokens_of(nodes) == 1:
        return list(nodes)
    packing = _Packing(share_routes(nodes, ctx), [t.name for t in outputs], ctx)
    for name in [t.name for node in packing.nodes for t in node.outputs if t.type == "F32"]:
        packing.pack(name)
    return norm_and_route(sum_and_pack(packing.result(), ctx), ctx)


def sum_and_pack(nodes: Sequence[Node], ctx: LowerContext) -> Nodes:
    """The nodes with each sum of experts, and the norm and packing of that sum, as one: the dispatch that adds the experts of a token has a
    whole row of it."""
    out: list[Node | None] = list(nodes)
    sums = {node.outputs[0].name: i for i, node in enumerate(nodes) if node.op == "LINEAR" and _sums_by_registers(node, ctx)}
    for i, node in enumerate(nodes):
        at = sums.get(node.inputs[0].name) if node.op == "PACK_F16" else None
        product = out[at] if at is not None else None
        if at is None or product is None or not _packs_whole_rows(node, product.outputs[0]):
            continue
        params = {
            **product.params,
            "roles": (*product.params["roles"], "units_norm"),
            "units_eps": node.params["eps"],
            "units_shape": node.params["shape"],
        }
        inputs, outputs = (*product.inputs, node.inputs[1]), (*product.outputs, *node.outputs)
        out[at], out[i] = dataclasses.replace(product, inputs=inputs, outputs=outputs, params=params), None
        del sums[node.inputs[0].name]
    return [node for node in out if node]


def norm_and_route(nodes: Sequence[Node], ctx: LowerContext) -> Nodes:
    """The nodes with norm and packing, the router's product and the choice of experts as one, where few tokens' experts read what is
    packed. It stands where the packing stood: what it reads beside are weights."""
    out: list[Node | None] = list(nodes)
    made = {t.name: i for i, node in enumerate(nodes) for t in node.outputs}
    readers: dict[str, int] = {}
    for name in (t.name for node in nodes for t in node.inputs):
        readers[name] = readers.get(name, 0) + 1
    for i, node in enumerate(nodes):
        product = made.get(node.inputs[0].name) if node.op == "TOPK_ROUTE" else None
        if product is None or nodes[product].op != "LINEAR" or readers[node.inputs[0].name] > 1:
            continue
        pack = made.get(inputs_by_role(nodes[product])["x"].name)
        if pack is None or nodes[pack].op != "PACK_F16":
            continue
        if one := with_norm(nodes[pack], nodes[product], node, ctx):
            out[pack], out[product], out[i] = one, None, None
    return [node for node in out if node]


def _sums_by_registers(node: Node, ctx: LowerContext) -> bool:
    """Whether it is a product by coop_reg that leaves F32 sums of experts and a residual."""
    gemv = LinearNode.of(node)
    by_registers = gemv.experts == "summed" and "residual" in gemv.extra and len(node.outputs) == 1 and gemv.y.type == "F32"
    shape = choice_of(gemv, ctx).shape if by_registers and not gemv.params.activates else None
    return shape is not None and shape.kernel == "coop_reg" and gemv.m % 4 == 0


def _packs_whole_rows(pack: Node, x: Tensor) -> bool:
    """Whether a PACK_F16 is of the rows of x as they are, normed, and for coop_reg."""
    whole = pack.params["roles"] == ("x", "norm") and pack.params["n"] == x.shape[0] and pack.inputs[0].shape == x.shape
    return whole and pack.params["shape"].kernel == "coop_reg"


def share_routes(nodes: Sequence[Node], ctx: LowerContext) -> Nodes:
    """Adds a ROUTE before the first of all GEMMs by the same experts (or by as many heads) in tiles of equal columns. Of few tokens the
    kernel that chooses the experts makes it."""
    out: Nodes = []
    routes: dict[str, Tensor] = {}
    for node in nodes:
        gemv = LinearNode.of(node) if node.op in ("LINEAR", "LINEAR_HEADS") else None
        by_heads = gemv is not None and gemv.experts == "heads"
        shape = choice_of(gemv, ctx).shape if gemv and (by_heads or "ids" in gemv.extra) else None
        if gemv and shape:
            experts = gemv.w.shape[0]
            route = route_heads_node(gemv.n, experts, shape.tile_n) if by_heads else route_node(gemv.extra["ids"], experts, shape.tile_n)
            if route.name not in routes:
                routes[route.name] = route.outputs[0]
                chooser = next(
                    (i for i, n in enumerate(out) if n.op == "TOPK_MOE" and route.inputs and n.outputs[1].name == route.inputs[0].name),
                    None,
                )
                if chooser is not None and shape.kernel == "coop_reg" and routes_too(out[chooser], ctx):
                    out[chooser] = with_route(out[chooser], route)
                else:
                    out.append(route)
            params = node.params if by_heads else {**node.params, "roles": (*node.params["roles"], "route")}
            node = dataclasses.replace(node, inputs=(*node.inputs, routes[route.name]), params=params)
        out.append(node)
    return out


class _Packing:
    """The nodes while their tensors are packed one by one. A node keeps its number; a replaced one becomes None."""

    def __init__(self, nodes: Sequence[Node], outputs: Sequence[str], ctx: LowerContext) -> None:
        self.nodes = nodes
        self.now: list[Node | None] = list(nodes)
        self.before: dict[int, Nodes] = {}
        self.outputs = outputs
        self.ctx = ctx
        choice = schedule_choice(nodes, ctx)
        self.by: By = choice["pack"]
        self.norms: bool = choice["norm"] == "prologue"
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for number, node in enumerate(nodes):
            for t in node.outputs:
                self.producer[t.name] = number
            for name in {t.name for t in node.inputs}:
                self.consumers.setdefault(name, []).append(number)

    def result(self) -> Nodes:
        return [new for i, node in enumerate(self.now) for new in (*self.before.get(i, ()), *([node] if node else []))]

    def pack(self, name: str) -> None:
        """Pack a tensor for the GEMMs that read it."""
        consumers = self.consumers.get(name, [])
        readers = [r for number in consumers if (r := self._reader(number, name))]
        producer = self.now[self.producer[name]]
        if not readers or producer is None:
            return
        (tensor,) = (t for t in producer.outputs if t.name == name)
        if len(readers) < len(consumers) or name in self.outputs or len(producer.outputs) > 1:
            return self._add_packs(name, tensor, readers)
        if self.by != "stage" and (out := self._by_producer(producer, readers)):
            params, shape = producer.params, readers[0].shape
            if producer.op in ("FLASH_ATTN_EXT", "RMS_NORM_PAIR"):
                order = ("units", shape) if shape.kernel == "coop_reg" else ("fragments", shape.fragments)
                params = {**params, **dict([order])}
            self.now[self.producer[name]] = as_stored(dataclasses.replace(producer, outputs=(out,), params=params), self.ctx)
            made_for = choice_of(LinearNode.of(producer), self.ctx).shape if producer.op == "LINEAR" else None
            for r in readers:
                self.now[r.number] = r.reading(out, made_for)
        elif self.norms and producer.op == "RMS_NORM_MUL" and not self._routes(readers) and self._normed_by_producer(producer, readers):
            self.now[self.producer[name]] = None
        elif self.norms and producer.op == "RMS_NORM_MUL" and any(_whole_rows(r, tensor) for r in readers):
            self.now[self.producer[name]] = None
            x = dataclasses.replace(producer.inputs[0], shape=tensor.shape)
            self._add_packs(name, x, readers, Norm(producer.inputs[1], float(producer.params["eps"])))
        else:
            self._add_packs(name, tensor, readers)

    def _reader(self, number: int, name: str) -> Reader | None:
        """A node as a GEMM by matrices that reads a tensor as its x, and as nothing else."""
        node = self.now[number]
        if node is None or node.op != "LINEAR" or [t.name for t in node.inputs].count(name) != 1:
            return None
        gemv = LinearNode.of(node)
        shape = choice_of(gemv, self.ctx).shape
        return Reader(number, gemv, shape) if shape and shape.kernel in ("coop_mat", "coop_reg") and gemv.x.name == name else None

    def _by_producer(self, producer: Node, readers: Sequence[Reader]) -> Tensor | None:
        """The packed tensor that a producer stores for all of these readers; None if it cannot."""
        first, name = readers[0], f"{producer.name}.f16"
        n, k = first.gemv.n, first.gemv.k
        if any(r.order != first.order for r in readers):
            return None
        if first.shape.kernel == "coop_reg":
            return self._units_by_producer(producer, readers, name)
        if producer.op == "FLASH_ATTN_EXT" and self.by == "producer":
            if not attention_choice(producer, self.ctx).stores_packed(first.shape, self.ctx.caps):
                return None
            return Tensor(name, "F16", (room(n, *(r.shape for r in readers)), k))
        if producer.op != "LINEAR":
            return None
        product = LinearNode.of(producer)
        choice = choice_of(product, self.ctx)
        shape = choice.shape
        if shape is None or "f16" not in choice.stores or Reader(0, product, shape).order != first.order:
            return None
        if product.route is not None:
            return packed(name, product.n * product.n_used, k, shape, product.w.shape[0])
        return Tensor(name, "F16", (room(n, shape, *(r.shape for r in readers)), ceil_div(k, UNIT) * UNIT))

    def _units_by_producer(self, producer: Node, readers: Sequence[Reader], name: str) -> Tensor | None:
        """The same in unit order: gate and up for down, attention for its output product, two norms side by side for what reads both."""
        if producer.op in ("FLASH_ATTN_EXT", "RMS_NORM_PAIR"):
            shapes = [r.shape for r in readers]
            widest = max(shapes, key=lambda s: s.tile_n)
            able = producer.op != "FLASH_ATTN_EXT" or all(map(attention_choice(producer, self.ctx).stores_units, shapes))
            stored = self.by == "producer" and able
            alike = len({(r.shape.matrix, r.shape.row_lanes) for r in readers}) == 1
            return packed_units(name, readers[0].gemv.n, readers[0].gemv.k, widest) if stored and alike else None
        if producer.op != "LINEAR":
            return None
        product = LinearNode.of(producer)
        choice = choice_of(product, self.ctx)
        shape = choice.shape
        if shape is None or "units" not in choice.stores:
            return None
        widest = max((shape, *(r.shape for r in readers)), key=lambda s: s.tile_n)
        columns = product.n if product.experts == "none" else product.n * product.n_used
        if not all(r.takes(shape) and r.columns == columns for r in readers):
            return None
        return packed_units(name, columns, readers[0].gemv.k, dataclasses.replace(shape, tile_n=widest.tile_n))

    def _routes(self, readers: Sequence[Reader]) -> bool:
        """Whether one of them is a router whose norm, choice and route the tables want as one dispatch (`norm_and_route`)."""
        for r in readers:
            choosers = [self.now[i] for i in self.consumers.get(r.gemv.y.name, [])]
            topk = next((node for node in choosers if node is not None and node.op == "TOPK_ROUTE"), None)
            if topk is not None and topk_choice(topk, topk.inputs[0], self.ctx)["experts_each"] != "none" and r.gemv.w.type == "F32":
                return True
        return False

    def _normed_by_producer(self, norm: Node, readers: Sequence[Reader]) -> bool:
        """If the norm's input is made by a product in registers and its output is read by such products: the first stores it in unit order,
        times the norm's weight, with sums of its squares; the others divide by the rms."""
        x, weight = norm.inputs
        number = self.producer.get(x.name, -1)
        product = self.now[number] if number >= 0 else None
        if self.by != "producer" or product is None or product.op != "LINEAR":
            return False
        if len(product.outputs) > 1:
            return False
        gemv = LinearNode.of(product)
        choice = choice_of(gemv, self.ctx)
        shape = choice.shape
        if shape is None or "normed units" not in choice.stores:
            return False
        if not all(r.takes(shape) and r.columns == gemv.n and r.gemv.k == gemv.m for r in readers):
            return False
        widest = max((shape, *(r.shape for r in readers)), key=lambda s: s.tile_n)
        units = packed_units(f"{norm.name}.units", gemv.n, gemv.m, widest)
        squares = Tensor(f"{norm.name}.squares", "F32", (gemv.n, gemv.m // shape.tile_m))
        roles = (*product.params["roles"], "units_norm")
        self.now[number] = dataclasses.replace(
            product, inputs=(*product.inputs, weight), outputs=(*product.outputs, units, squares), params={**product.params, "roles": roles}
        )
        for r in readers:
            node = r.reading(units, shape)
            params = {**node.params, "roles": (*node.params["roles"], "squares"), "squares_eps": norm.params["eps"]}
            self.now[r.number] = dataclasses.replace(node, inputs=(*node.inputs, squares), params=params)
        return True

    def _add_packs(self, name: str, x: Tensor, readers: Sequence[Reader], norm: Norm | None = None) -> None:
        """Adds a PACK_F16 of x for the readers of each order, before the first of them. With a norm, the one for dense readers stores its
        factors for those by experts."""
        by_order: dict[tuple[str, int], list[Reader]] = {}
        in_registers = [r for r in readers if r.shape.kernel == "coop_reg" and not r.by_experts]
        for r in sorted(readers, key=lambda r: r.by_experts):
            like = next((d for d in in_registers if r.by_experts and r.takes(d.shape) and r.columns == d.columns), r)
            by_order.setdefault(like.order, []).append(r)
        several = sum(group[0].shape.kernel == "coop_reg" for group in by_order.values()) > 1
        stores = any(r.gemv.route is None and r.shape.kernel == "coop_mat" for r in readers) and len(by_order) > 1
        factors = Tensor(f"{name}.factors", "F32", (prod(x.shape[:-1]),)) if norm and stores else None
        for mine in sorted(by_order.values(), key=lambda group: group[0].gemv.route is not None):  # factors are stored first
            first, ahead_of = mine[0].gemv, mine
            if first.route is None and len(x.shape) > 2:  # heads side by side
                x = dataclasses.replace(x, shape=(x.shape[0], first.k))
            packed_for = mine[0].shape if mine[0].shape.kernel == "coop_reg" else None
            if packed_for is not None:
                suffix = ".units" if not several or not mine[0].by_experts else f".{mine[0].order[0]}{mine[0].order[1]}"
                pack = pack_node(f"{name}{suffix}", x, mine[0].columns, packed_for, norm=norm)
            elif first.route is None:
                columns = room(first.n, *(r.shape for r in mine))
                pack = pack_node(f"{name}.f16", x, first.n, mine[0].shape, columns=columns, norm=norm, factors=factors, stores_factors=True)
                ahead_of = list(readers) if factors else mine
            else:
                shared = first.n_used if len(x.shape) < 3 or x.shape[1] == 1 else 1
                pack = pack_node(
                    f"{name}.f16.{first.route.name}",
                    x,
                    first.n * first.n_used,
                    mine[0].shape,
                    norm=norm,
                    route=first.route,
                    experts=first.w.shape[0],
                    x_shared=shared,
                    factors=factors,
                )
            self.before.setdefault(min(r.number for r in ahead_of), []).append(pack)
            for r in mine:
                self.now[r.number] = r.reading(pack.outputs[0], packed_for)


def _whole_rows(reader: Reader, x: Tensor) -> bool:
    """Whether a dense GEMM reads the rows of x as they are, not several as one."""
    return reader.gemv.route is None and x.shape[-1] == reader.gemv.k

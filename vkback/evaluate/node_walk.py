"""Walks the nodes of a plan in float64, twice side by side: exactly, and with every rounding of activations that the device's kernels make.

The first run is what each node should hold, the difference of the two what the roundings alone do to it: the expected error of a node
(docs/comparing_nodes.md). Where a device chose other experts than the walk would, both go on with the device's, so that one near tie does
not hide all that comes behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from vkback import quants
from vkback.engine.weight_rows import gather_rows, vector_values
from vkback.graph import Graph, Node, Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array, Tolerance
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_node import LinearParams, inputs_by_role
from vkback.ops.moe.router import linear_of, selection_bias
from vkback.ops.moe.topk import order_of, topk_params
from vkback.ops.op import OPS
from vkback.ops.quantize import rounded_rows

LOGIT_DEVIATIONS = 8
"""Two experts may swap if their logits differ by less than this many rms errors: each can be four sigma off. Of 128 experts in 48 layers
one in 10^4 is that far off in one of them."""

MIN_ERROR = 1e-6
"""Of a router's logits, in times their rms: what f32 arithmetic alone does to a product over thousands of values."""

ROUTERS = ("TOPK_MOE", "MOE_ROUTER")


@dataclass(frozen=True)
class Item:
    """A value to compare: a node's output, or some columns of it that are a node of the unfused graph.

    sources  names of what it is made from
    columns  (first, end) along the last axis; None: all
    """

    name: str
    op: str
    sources: tuple[str, ...]
    tensor: Tensor
    node: int
    columns: tuple[int, int] | None = None

    def of(self, values: Mapping[str, Array]) -> Array:
        """Its part of the tensor's value."""
        value = values[self.tensor.name]
        return value if self.columns is None else value[..., slice(*self.columns)]


def items_of(nodes: Sequence[Node], graph: Graph) -> list[Item]:
    """Everything that the nodes of a plan of `graph` make, in their order. Packed products of attention are taken apart into those of the
    graph."""
    products = {node.inputs[0].name: node for node in graph.nodes if node.op == "MUL_MAT"}
    found: list[Item] = []
    for number, node in enumerate(nodes):
        for t in node.outputs:
            if t.kind == "input":
                continue
            if "rows_total" in node.params and t is node.outputs[0]:
                found += _packed(node, number, t, products, graph)
            else:
                found.append(Item(t.name, node.op, tuple(s.name for s in node.inputs), t, number))
    return found


def _packed(node: Node, number: int, out: Tensor, products: Mapping[str, Node], graph: Graph) -> list[Item]:
    """The products that one LINEAR makes of rows of a packed output."""
    by = inputs_by_role(node)
    weight, row = by["w"], LinearParams.of(node.params).row0
    rest = tuple(t.name for role, t in by.items() if role not in ("w", "bias"))
    found = []
    for source in weight.recipe.weights if weight.recipe else (weight.name,):
        product = products[source]
        rows = product.outputs[0].shape[-1]
        name = product.outputs[0].name
        if "bias" in by:
            name = next(n.outputs[0].name for n in graph.consumers(product.outputs[0]) if n.op == "ADD")
        found.append(Item(name, node.op, (source, *rest), out, number, (row, row + rows)))
        row += rows
    return found


@dataclass
class Swap:
    """A device chose other experts than the walk: how far apart the two are in what experts are ordered by, and how far may be."""

    distance: float
    allowed: float


@dataclass
class WalkValues:
    """What a walk knows of the nodes: values by tensor, of the exact run and of the rounded one; swaps by name of the ids."""

    exact: dict[str, Array]
    rounded: dict[str, Array]
    swaps: dict[str, Swap]


class Walk:
    """One model's nodes in float64. `run` takes tokens one batch after another; caches stay."""

    def __init__(self, model: Model, nodes: Sequence[Node], ctx: LowerContext) -> None:
        self.model, self.nodes, self.ctx = model, nodes, ctx
        self._states: tuple[dict[str, Array], dict[str, Array]] = ({}, {})

    def run(self, inputs: Mapping[str, Array], device: Mapping[str, Array], on_node: Callable[[], object] | None = None) -> WalkValues:
        """One batch. device: its values by tensor, of which the ids of experts count; on_node: called after each node."""
        made = WalkValues({**inputs, **self._states[0]}, {**inputs, **self._states[1]}, {})
        pair = (made.exact, made.rounded)
        for node in self.nodes:
            weights = Weights(self.model, node)
            ids = ids_of(node)
            taken = device.get(ids.name) if ids else None
            for values, rounds in zip(pair, (False, True), strict=True):
                results = evaluate(node, values, weights, self.ctx if rounds else None, taken)
                for t, value in zip(node.outputs, results, strict=True):
                    _store(values, node, t, _as_stored(t, value, values.get(t.name)) if rounds else value)
            if ids and taken is not None:
                self._note_swap(node, ids, taken, weights, made)
            if on_node is not None:
                on_node()
        for kept, values in zip(self._states, pair, strict=True):
            kept.update({t.name: values[t.name] for n in self.nodes for t in n.outputs if t.kind == "state"})
        return made

    def _note_swap(self, node: Node, ids: Tensor, taken: Array, weights: Weights, made: WalkValues) -> None:
        """Where a device's experts are others: whether those may be taken for each other."""
        orders = [router_order(node, values, weights) for values in (made.exact, made.rounded)]
        own = np.argsort(-orders[0], axis=-1, kind="stable")[:, : taken.shape[-1]]
        if np.array_equal(own, taken):
            return
        known = np.isfinite(orders).all(axis=0)
        error = float(np.sqrt(np.mean(np.square((orders[1] - orders[0])[known])))) if known.any() else 0.0
        rms = float(np.sqrt(np.mean(np.square(orders[0][known])))) if known.any() else 0.0
        legal = ((taken >= 0) & (taken < orders[0].shape[-1])).all() and all(len(set(row)) == len(row) for row in taken.tolist())
        distance = float("inf")
        if legal:
            gaps = np.take_along_axis(orders[0], own, -1) - np.take_along_axis(orders[0], taken.astype(np.int64), -1)
            distance = float(np.max(np.abs(gaps))) if np.isfinite(gaps).all() else float("inf")
        made.swaps[ids.name] = Swap(distance, LOGIT_DEVIATIONS * max(error, MIN_ERROR * rms))


def ids_of(node: Node) -> Tensor | None:
    """The ids of experts that a node chooses."""
    chooses = node.op in ROUTERS or (node.op == "LINEAR" and "logits" in node.params["roles"])
    return node.outputs[-1] if chooses else None


def router_order(node: Node, values: Mapping[str, Array], weights: Weights) -> Array:
    """What the experts of a choosing node are ordered by, float64 [n, n_expert]."""
    logits, bias = _logits(node, values, weights)
    return order_of(logits, bias, node.params)


def _logits(node: Node, values: Mapping[str, Array], weights: Weights, ctx: LowerContext | None = None) -> tuple[Array, list[Array]]:
    """Logits and selection bias, if there is one, of a node that chooses experts."""
    if node.op == "MOE_ROUTER":
        bias = selection_bias(node)
        (logits,) = _of_op(linear_of(node), [_value(t, values, weights) for t in node.inputs], ctx)
        return np.asarray(logits, np.float64), [_value(bias, values, weights)] if bias is not None else []
    by = inputs_by_role(node) if node.op == "LINEAR" else {}
    logits_t = by.get("logits", node.inputs[0])
    bias_t = [by["selection_bias"]] if "selection_bias" in by else list(node.inputs[1:]) if not by else []
    return np.asarray(_value(logits_t, values, weights), np.float64), [_value(t, values, weights) for t in bias_t]


def chosen_as(logits: Array, bias: Sequence[Array], params: Mapping[str, object], taken: Array | None) -> list[Array]:
    """Weights and ids of TOPK_MOE; taken: the ids that a device chose, for which the weights are then."""
    topk = OPS["TOPK_MOE"]
    params = topk_params(params)
    own = topk.reference([logits, *bias], params)
    if taken is None or np.array_equal(own[1], taken) or (taken < 0).any() or (taken >= logits.shape[-1]).any():
        return own
    ids = taken.astype(np.int64)
    plain = {k: v for k, v in params.items() if k not in ("n_group", "n_group_used")}
    among_chosen = bool(params["norm"]) or params["gating"] == "softmax_weight"
    some = np.take_along_axis(logits, ids, -1) if among_chosen else logits
    by_size, order = topk.reference([some], plain | {"n_used": some.shape[-1]})
    weights = np.empty_like(by_size)
    np.put_along_axis(weights, order.astype(np.int64), by_size, -1)
    return [weights if among_chosen else np.take_along_axis(weights, ids, -1), taken.astype(np.int32)]


class Weights:
    """The weights of one node, decoded at the first request; of stacks of experts those that were chosen."""

    def __init__(self, model: Model, node: Node) -> None:
        self._model, self._node = model, node
        self._known: dict[tuple[str, bytes], Array] = {}

    def whole(self, tensor: Tensor) -> Array:
        return self._get(tensor, None)

    def rows(self, tensor: Tensor, rows: Array) -> Array:
        """Rows of a table, float64 [len(rows), k]."""
        raw = np.concatenate([gather_rows(self._model.file, tensor, int(r), int(r) + 1) for r in rows])
        return self._scaled(tensor, quants.decode(tensor.type, raw))

    def experts(self, tensor: Tensor, experts: Array) -> Array:
        """Some experts of a stack, [len(experts), m, k]; of their biases [len(experts) * m]."""
        return self._get(tensor, experts)

    def _get(self, tensor: Tensor, experts: Array | None) -> Array:
        key = tensor.name, b"" if experts is None else experts.tobytes()
        if key not in self._known:
            self._known[key] = self._decode(tensor, experts)
        return self._known[key]

    def _decode(self, tensor: Tensor, experts: Array | None) -> Array:
        file = self._model.file
        if len(tensor.shape) == 1:
            return np.asarray(vector_values(file, tensor), np.float64)
        if experts is None:
            raw = gather_rows(file, tensor, 0, prod(tensor.shape[:-1]))
            return self._scaled(tensor, quants.decode(tensor.type, raw)).reshape(tensor.shape)
        m = tensor.shape[-2]
        raw = np.concatenate([gather_rows(file, tensor, int(e) * m, (int(e) + 1) * m) for e in experts])
        return self._scaled(tensor, quants.decode(tensor.type, raw)).reshape(len(experts), m, tensor.shape[-1])

    @staticmethod
    def _scaled(tensor: Tensor, values: Array) -> Array:
        return np.asarray(values, np.float64) * (tensor.recipe.scale if tensor.recipe else 1.0)


def _value(t: Tensor, values: Mapping[str, Array], weights: Weights) -> Array:
    """An input as references take it. States begin as zeros."""
    if t.kind == "weight":
        return weights.whole(t)
    if t.kind == "state" and t.name not in values:
        return np.zeros(t.shape, {"F16": np.float16, "F32": np.float32}[t.type])
    return values[t.name].reshape(t.shape)


def evaluate(
    node: Node, values: Mapping[str, Array], weights: Weights, ctx: LowerContext | None, taken: Array | None = None
) -> list[Array]:
    """The outputs of a node. ctx: round activations as its kernels do; None: exactly. taken: experts that a device chose.

    Of a node that fills some rows of a wider output, those rows.
    """
    if node.op == "GET_ROWS" and node.inputs[0].kind == "weight":
        ids = values[node.inputs[1].name]
        table = weights.rows(node.inputs[0], ids)
        inputs: list[Array] = [table, np.arange(len(ids))]
        return [np.asarray(r) for r in OPS[node.op].reference(inputs, node.params)]
    if node.op in ROUTERS:
        return chosen_as(*_logits(node, values, weights, ctx), node.params, taken)
    if node.op == "LINEAR" and "logits" in node.params["roles"]:
        chosen = chosen_as(*_logits(node, values, weights), node.params, taken)
        return [*evaluate(_by_ids(node), {**values, node.outputs[-1].name: chosen[1]}, weights, ctx), *chosen]
    return _of_op(node, inputs_of(node, values, weights), ctx)


def _by_ids(node: Node) -> Node:
    """A LINEAR that chooses its experts, as one whose experts are chosen already."""
    by = {role: t for role, t in inputs_by_role(node).items() if role not in ("logits", "selection_bias")}
    by["ids"] = node.outputs[-1]
    return dataclasses.replace(node, inputs=tuple(by.values()), outputs=node.outputs[:1], params={**node.params, "roles": tuple(by)})


def inputs_of(node: Node, values: Mapping[str, Array], weights: Weights) -> list[Array]:
    """A node's inputs; where it has a stack of experts, those chosen alone, and ids that count these."""
    roles = node.params.get("roles", ("w", "x", "ids") if node.op == "MUL_MAT_ID" else ("",) * len(node.inputs))
    by_ids = "ids" in roles and node.inputs[roles.index("w")].kind == "weight"
    used = np.unique(values[node.inputs[roles.index("ids")].name]) if by_ids else None
    first = int(node.params.get("row0", 0))
    found = []
    for role, t in zip(roles, node.inputs, strict=True):
        if used is not None and role == "ids":
            found.append(np.searchsorted(used, values[t.name].reshape(t.shape)))
        elif used is not None and t.kind == "weight" and role == "w":
            found.append(weights.experts(t, used))
        elif used is not None and t.kind == "weight" and role == "bias":
            found.append(weights.whole(t).reshape(node.inputs[0].shape[0], -1)[used].ravel())
        elif role == "residual" and "rows_total" in node.params:
            rows = node.inputs[0].shape[-2] >> LinearParams.of(node.params).glu
            found.append(_value(t, values, weights)[..., first : first + rows])
        else:
            found.append(_value(t, values, weights))
    return found


def _of_op(node: Node, inputs: list[Array], ctx: LowerContext | None) -> list[Array]:
    """The reference output; with `ctx`, computed on inputs rounded as this device's kernel rounds them (Q8_1 or f16)."""
    op = OPS[node.op]
    if ctx is not None:
        found = op.rounded(inputs, node, ctx)
        if found is not None:
            return [np.asarray(r) for r in found.outputs]
        halved = op.as_f16(inputs, node, ctx)
        if halved is not None:
            return [np.asarray(r) for r in halved]
    return [np.asarray(r) for r in op.reference(inputs, node.params)]


def _as_stored(t: Tensor, value: Array, before: Array | None) -> Array:
    """A value as memory holds it. before: what it held before.

    Vulkan lets a device round to F16 either way. The references round to nearest; of what is new in a KV cache, every other value goes the
    other way here, about as many as truncation would make different.
    """
    if t.type == "Q8_1":
        return rounded_rows(value)
    if t.kind == "state" and t.type == "F16":
        new = value.ravel() != (0.0 if before is None else before.ravel())
        new[::2] = False
        return np.where(new, np.nextafter(value.ravel(), np.float16(0.0)), value.ravel()).reshape(value.shape)
    if t.kind == "state" or t.type != "F32":
        return value
    return value.astype(np.float32).astype(np.float64)


def _store(values: dict[str, Array], node: Node, t: Tensor, value: Array) -> None:
    """Keep an output; rows of a wider one go into their place."""
    if "rows_total" not in node.params or t is not node.outputs[0]:
        values[t.name] = value.reshape(t.shape)
        return
    first, rows = LinearParams.of(node.params).row0, value.shape[-1]
    whole = values[t.name] if t.name in values and values[t.name].shape == t.shape else np.full(t.shape, np.nan)
    whole[..., first : first + rows] = value.reshape(*t.shape[:-1], rows)
    values[t.name] = whole


def own_tolerance(node: Node, values: Mapping[str, Array], weights: Weights, ctx: LowerContext) -> Tolerance:
    """How far the kernel of a node may be from its reference of the activations as it rounds them; half a step of a Q8_1 output apart.
    values: with the ids that the node chose."""
    op = OPS[node.op]
    if node.op == "LINEAR" and "logits" in node.params["roles"]:
        return own_tolerance(_by_ids(node), values, weights, ctx)
    if node.op not in (*ROUTERS, "GET_ROWS"):
        found = op.rounded(inputs_of(node, values, weights), node, ctx)
        if found is not None:
            return found.tolerance
    plain = dataclasses.replace(node, outputs=tuple(dataclasses.replace(t, type="F32") if t.type == "Q8_1" else t for t in node.outputs))
    return op.tolerance(plain, ctx)

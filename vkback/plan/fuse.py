"""Fusion: rewrites a graph's nodes into fewer, larger ones. Every fused node names an op whose reference is the chain it replaces.

A pass is a function from nodes to nodes. Tensors are matched by name; a fused node stands where the last node it replaces stood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from vkback.graph import Graph, Node, Recipe, Tensor
from vkback.ops import rope_angles
from vkback.ops.family import Choice, declare
from vkback.ops.lowering import LowerContext
from vkback.ops.mat_mul_lower import x_wanted
from vkback.ops.mat_vec_config import choice_problem, prologue_problem
from vkback.ops.mat_vec_heads import heads_problem
from vkback.ops.mat_vec_node import FUSED_ROLES, MatVecNode, Path, bindings
from vkback.ops.mul_mat_batched import is_batched
from vkback.ops.router import router_problem
from vkback.ops.topk import topk_params
from vkback.ops.view import View

ROUTERS = ("mat_vec", "experts", "stage")
"""Who chooses the experts: the last workgroup of the router's mat-vec, every workgroup of the experts' mat-vec, or a stage of its own."""

ROPERS = ("attention", "product", "stage")
"""Who turns Q and K and stores K and V: attention of one token, products of Q, K and V of several (vkback/plan/heads.py), or a stage of its
own; which it is wherever that one cannot."""

declare(
    "schedule",
    match={"n": "number", "n_expert": "number"},
    params={
        "norm": ("prologue", "stage"),
        "rope": ROPERS,
        "quantize": ("producer", "attention", "stage"),
        "router": ROUTERS,
        "pack": ("producer", "mat_mul", "stage"),  # of prompts (vkback/plan/pack.py)
        "sync": ("barrier", "sentinel"),
    },
)

Nodes = list[Node]


class Index:
    """Producers and consumers of the tensors of a node list."""

    def __init__(self, nodes: Sequence[Node], outputs: Iterable[str] = ()) -> None:
        # Made anew after every rewrite: half of the time of a plan.
        self.producer: dict[str, Node] = {t.name: node for node in nodes for t in node.outputs}
        self.consumers: dict[str, list[Node]] = {}
        self.outputs = frozenset(outputs)
        consumers = self.consumers
        for node in nodes:
            for t in node.inputs:
                if t.name in consumers:
                    consumers[t.name].append(node)
                else:
                    consumers[t.name] = [node]

    def read_once(self, tensor: Tensor) -> bool:
        """Whether one node reads a tensor, and it is no output of the graph."""
        return tensor.name not in self.outputs and len(self.consumers.get(tensor.name, [])) == 1

    def made_by(self, tensor: Tensor, op: str) -> Node | None:
        """The producer of a tensor if it is this op and nobody else reads the tensor."""
        node = self.producer.get(tensor.name)
        return node if node is not None and node.op == op and self.read_once(tensor) else None


def replace(nodes: Sequence[Node], old: Iterable[Node], new: Sequence[Node]) -> Nodes:
    """`new` in the place of the last of `old`; the others of `old` vanish."""
    gone = set(map(id, old))
    last = max(i for i, number in enumerate(map(id, nodes)) if number in gone)
    return [*(n for n in nodes[:last] if id(n) not in gone), *new, *nodes[last + 1 :]]


def tokens_of(nodes: Sequence[Node]) -> int:
    """How many tokens go through a graph at once."""
    return next((t.shape[0] for node in nodes for t in node.inputs if t.name == "pos"), 1)


def schedule_choice(nodes: Sequence[Node], ctx: LowerContext) -> Choice:
    """What the tables say of the schedule of a graph."""
    n_expert = max((node.inputs[0].shape[-1] for node in nodes if node.op == "TOPK_MOE"), default=0)
    return ctx.tuning.pick("schedule", n=tokens_of(nodes), n_expert=n_expert)


def fuse(graph: Graph, ctx: LowerContext, *, level: str = "all") -> Nodes:
    """Fused nodes of a graph for one device.

    level  "all"; "none": only views are resolved, each op runs by itself (the form that fused runs are compared with)
    """
    nodes = resolve_views(graph.nodes)
    outputs = [t.name for t in graph.outputs]
    if level == "none":
        return nodes
    n = tokens_of(nodes)
    choice = schedule_choice(nodes, ctx)
    nodes = as_mat_vec(nodes)
    if n == 1 and not ctx.exact:
        nodes = fuse_ssm(nodes, outputs, ctx)
    for step in (fuse_embedding, fuse_norms, fuse_latent, fuse_attention, fuse_bias, fuse_glu, fuse_gelu, fuse_experts, fuse_residual):
        nodes = step(nodes, outputs)
    nodes = pack_qkv(nodes, n == 1 and choice["rope"] == "attention")
    if n == 1 and choice["norm"] == "prologue":
        nodes = norms_into_prologue(nodes, outputs, ctx)
        nodes = post_norms_into_prologue(nodes, outputs, ctx)
    if choice["router"] == "mat_vec":
        nodes = fuse_router(nodes, outputs, ctx)
    nodes = quantize_activations(nodes, outputs, ctx, by=choice["quantize"])
    return fuse_choice(nodes, outputs, ctx) if choice["router"] == "experts" else nodes


def resolve_views(nodes: Sequence[Node]) -> Nodes:
    """A VIEW is its source under another shape: consumers get the source with the view's shape."""
    source: dict[str, Tensor] = {}
    out: Nodes = []
    for node in nodes:
        inputs = tuple(dataclasses.replace(source[t.name], shape=t.shape) if t.name in source else t for t in node.inputs)
        if node.op == "VIEW":
            source[node.outputs[0].name] = inputs[0]
        else:
            out.append(dataclasses.replace(node, inputs=inputs))
    return out


def _rewrite(nodes: Nodes, outputs: Iterable[str], match: Callable[[Node, Index], tuple[list[Node], Node] | None]) -> Nodes:
    """Apply `match` (node, index) -> (nodes to replace, replacement) until nothing matches."""
    progress = True
    while progress:
        progress = False
        index = Index(nodes, outputs)
        touched: set[int] = set()
        for node in list(nodes):
            found = match(node, index)
            if found is None or any(id(n) in touched for n in found[0]):
                continue
            touched.update(id(n) for n in found[0])
            nodes = replace(nodes, found[0], [found[1]])
            progress = True
    return nodes


def fuse_embedding(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """GET_ROWS of a weight, SCALE -> GET_ROWS with a scale."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        rows = index.made_by(node.inputs[0], "GET_ROWS") if node.op == "SCALE" and node.params["bias"] == 0.0 else None
        if rows is None or rows.inputs[0].kind != "weight" or "scale" in rows.params:
            return None
        return [rows, node], dataclasses.replace(rows, outputs=node.outputs, params={**rows.params, "scale": node.params["scale"]})

    return _rewrite(nodes, outputs, match)


def fuse_norms(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """RMS_NORM, MUL by a weight -> RMS_NORM_MUL; with an ADD of another tensor behind it -> RMS_NORM_MUL_ADD. NORM, MUL by a weight, ADD of
    a bias -> NORM_MUL_ADD."""

    def rms(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        norm = index.made_by(node.inputs[0], "RMS_NORM") if node.op == "MUL" and node.inputs[1].kind == "weight" else None
        if norm is None or node.inputs[1].shape != norm.inputs[0].shape[-1:]:  # norms of groups, a weight for all of them
            return None
        return [norm, node], Node("RMS_NORM_MUL", (*norm.inputs, node.inputs[1]), node.outputs, norm.params)

    def added(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "ADD" or node.inputs[1].kind == "weight" or node.inputs[0].elements != node.inputs[1].elements:
            return None
        for mine, other in (node.inputs, node.inputs[::-1]):
            norm = index.made_by(mine, "RMS_NORM_MUL")
            if norm is not None:
                return [norm, node], Node("RMS_NORM_MUL_ADD", (*norm.inputs, other), node.outputs, norm.params)
        return None

    def layer_norm(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        weighted = index.made_by(node.inputs[0], "MUL") if node.op == "ADD" and node.inputs[1].kind == "weight" else None
        norm = index.made_by(weighted.inputs[0], "NORM") if weighted is not None and weighted.inputs[1].kind == "weight" else None
        if weighted is None or norm is None or weighted.inputs[1].shape != node.inputs[1].shape:
            return None
        fused = Node("NORM_MUL_ADD", (*norm.inputs, weighted.inputs[1], node.inputs[1]), node.outputs, norm.params)
        return [norm, weighted, node], fused

    for match in (rms, added, layer_norm):
        nodes = _rewrite(nodes, outputs, match)
    return nodes


def fuse_ssm(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """SSM_CONV read by SSM_SCAN alone, of one token -> SSM_CONV_SCAN, where the device binds as many buffers."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        conv = index.made_by(node.inputs[0], "SSM_CONV") if node.op == "SSM_SCAN" else None
        if conv is None or conv.inputs[0].name != node.inputs[1].name or conv.params["offset"] != node.outputs[0].shape[-1]:
            return None
        zx, *weights, pos, conv_state = conv.inputs
        *per_head, state = (*node.inputs[2:5], node.inputs[6])
        inputs = (zx, *weights, *per_head, pos, conv_state, state)
        if len(inputs) + 1 > ctx.caps.max_storage_bindings:
            return None
        return [conv, node], Node("SSM_CONV_SCAN", inputs, (node.outputs[0], conv_state, state), node.params)

    return _rewrite(nodes, outputs, match)


def fuse_attention(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """Q and K norms, ROPE of both or of neither, both cache stores -> QKV_ROPE_SET_ROWS, ahead of its FLASH_ATTN_EXT."""
    index = Index(nodes, outputs)
    for attention in [n for n in nodes if n.op == "FLASH_ATTN_EXT"]:
        q_in, cache_k, cache_v = attention.inputs[:3]
        stores = {n.outputs[0].name: n for n in nodes if n.op == "SET_ROWS" and n.outputs[0].name in (cache_k.name, cache_v.name)}
        if len(stores) != 2 or cache_k.shape != cache_v.shape:
            continue
        store_k, store_v = stores[cache_k.name], stores[cache_v.name]
        k_in = store_k.inputs[0]
        ropes = [rope for rope in (index.made_by(q_in, "ROPE"), index.made_by(k_in, "ROPE")) if rope is not None]
        gone = [*ropes, store_k, store_v]
        params: dict[str, Any]
        factors: tuple[Tensor, ...] = ()
        if not ropes and index.read_once(q_in) and index.read_once(k_in):
            params = {**rope_angles.DEFAULTS, "n_dims": 0}
            q, k, pos, q_out = q_in, k_in, attention.inputs[3], dataclasses.replace(q_in, name=f"{q_in.name}.heads")
        elif len(ropes) == 2 and ropes[0].params == ropes[1].params:
            params = dict(ropes[0].params)
            (q, pos, *rest), k, q_out = ropes[0].inputs, ropes[1].inputs[0], q_in
            factors = tuple(rest)
        else:
            continue
        v = store_v.inputs[0]
        norms = index.made_by(q, "RMS_NORM_MUL"), index.made_by(k, "RMS_NORM_MUL")
        extra: tuple[Tensor, ...] = ()
        if norms[0] is not None and norms[1] is not None:
            gone += [norms[0], norms[1]]
            q, k = norms[0].inputs[0], norms[1].inputs[0]
            extra = (norms[0].inputs[1], norms[1].inputs[1])
            params["eps"] = norms[0].params["eps"]
        params |= {"has_norm": bool(extra), "has_ff": bool(factors), "packed": False}
        params |= {key: c.type for key, c in (("type_k", cache_k), ("type_v", cache_v)) if c.type != "F16"}
        q, k, v = (dataclasses.replace(t, shape=shape) for t, shape in ((q, q_in.shape), (k, k_in.shape), (v, k_in.shape)))
        fused = Node("QKV_ROPE_SET_ROWS", (q, k, v, pos, cache_k, cache_v, *extra, *factors), (q_out, cache_k, cache_v), params)
        nodes = replace(nodes, gone, [fused])
        if q_out is not q_in:
            reads = dataclasses.replace(attention, inputs=(q_out, *attention.inputs[1:]))
            nodes = [reads if n is attention else n for n in nodes]
        index = Index(nodes, outputs)
    return nodes


def fuse_latent(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """MLA: what is between the products and FLASH_ATTN_EXT -> MLA_ROPE_SET_ROWS, with Q in two parts; the products by heads (MUL_MAT of a
    view, PERMUTE) -> MAT_VEC_HEADS; for one token the latent's part of its row is read where it is."""
    index = Index(nodes, outputs)
    for attention in [n for n in nodes if n.op == "FLASH_ATTN_EXT"]:
        found = _latent(attention, index, nodes)
        if found is not None:
            gone, new = found
            nodes = replace(nodes, [*gone, attention], new)
            index = Index(nodes, outputs)
    for permute in [n for n in nodes if n.op == "PERMUTE" and n.params["axes"] == (1, 0, 2)]:
        product = index.made_by(permute.inputs[0], "MUL_MAT")
        if product is None or "w_view" in product.params or len(product.inputs[0].shape) != 3:
            continue
        w, x = product.inputs
        (heads, m, k), n = w.shape, permute.outputs[0].shape[0]
        width = x.elements // (n * heads)
        flat = dataclasses.replace(x, shape=(n, heads * width))
        if product.params.get("x_view") != View(0, (heads, n, k), (width, heads * width, 1)) or heads_problem(w, flat):
            continue
        y = dataclasses.replace(permute.outputs[0], shape=(n, heads * m))
        nodes = replace(nodes, [product, permute], [Node("MAT_VEC_HEADS", (w, flat), (y,))])
    if tokens_of(nodes) > 1:
        return nodes
    for part in [n for n in nodes if n.op == "CONT" and "view" in n.params]:
        x, y, view = part.inputs[0], part.outputs[0], part.params["view"]
        if part.name in outputs or view != View(0, (1, y.elements), (x.elements, 1)):
            continue
        prefix = dataclasses.replace(x, shape=y.shape)
        nodes = [
            dataclasses.replace(n, inputs=tuple(prefix if t.name == y.name else t for t in n.inputs)) for n in nodes if n is not part
        ]
    return nodes


def _latent(attention: Node, index: Index, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]] | None:
    """The nodes that MLA_ROPE_SET_ROWS takes the place of, and it with its attention."""
    query, cache_k, cache_v, pos = attention.inputs[:4]
    if len(attention.inputs) > 4 or "window" in attention.params:
        return None
    n, heads, _ = query.shape
    stores = [next((s for s in nodes if s.op == "SET_ROWS" and s.outputs[0].name == c.name), None) for c in (cache_k, cache_v)]
    joined = index.made_by(query, "CONCAT")
    stored = index.made_by(stores[0].inputs[0], "CONCAT") if stores[0] is not None else None
    if joined is None or stored is None or stores[0] is None or stores[1] is None or len(joined.inputs) != 2 or len(stored.inputs) != 2:
        return None
    legacy = cache_k.name != cache_v.name
    rope_q, repeat = index.made_by(joined.inputs[1], "ROPE"), index.made_by(stored.inputs[1], "REPEAT") if legacy else None
    rope_k = index.made_by(repeat.inputs[0] if repeat is not None else stored.inputs[1], "ROPE")
    parts = [index.made_by(rope.inputs[0], "CONT") if rope is not None else None for rope in (rope_q, rope_k)]
    if rope_q is None or rope_k is None or parts[0] is None or parts[1] is None or rope_q.params != rope_k.params:
        return None
    q, kv = parts[0].inputs[0], parts[1].inputs[0]
    dim_k, rot, row = q.elements // (n * heads), rope_q.inputs[0].shape[2], kv.elements // n
    views = [
        (parts[0], View(dim_k - rot, (n, heads, rot), (heads * dim_k, dim_k, 1))),
        (parts[1], View(row - rot, (n, 1, rot), (row, row, 1))),
    ]
    gone = [joined, stored, rope_q, rope_k, parts[0], parts[1], stores[0]]
    if legacy:
        own, value, q_own = (index.made_by(t, "CONT") for t in (stored.inputs[0], stores[1].inputs[0], joined.inputs[0]))
        if repeat is None or own is None or value is None or q_own is None or own.inputs[0].name != value.inputs[0].name:
            return None
        third, first = own.inputs[0], dataclasses.replace(q, shape=(n, heads, dim_k))
        both, nope = third.elements // (n * heads), dim_k - rot
        views += [
            (own, View(0, (n, heads, nope), (heads * both, both, 1))),
            (value, View(nope, (n, heads, both - nope), (heads * both, both, 1))),
            (q_own, View(0, (n, heads, nope), (heads * dim_k, dim_k, 1))),
        ]
        gone += [stores[1], repeat, own, value, q_own]
        params: dict[str, Any] = {"legacy": True}
        if q_own.inputs[0].name != q.name:
            return None
    else:
        norm = index.made_by(stored.inputs[0], "RMS_NORM_MUL")
        latent = index.made_by(norm.inputs[0], "CONT") if norm is not None else None
        if norm is None or latent is None or latent.inputs[0].name != kv.name:
            return None
        third, first = norm.inputs[1], joined.inputs[0]
        views.append((latent, View(0, (n, row - rot), (row, 1))))
        gone += [norm, latent]
        params = {"legacy": False, "eps": norm.params["eps"]}
    if any(part.params.get("view") != view for part, view in views) or rope_q.params["mode"] != "normal":
        return None
    factors = rope_q.inputs[2:]
    caches = (cache_k, cache_v) if legacy else (cache_k,)
    params |= {key: c.type for key, c in zip(("type_k", "type_v"), caches, strict=False) if c.type != "F16"}
    inputs = (dataclasses.replace(q, shape=(n, heads, dim_k)), dataclasses.replace(kv, shape=(n, row)), third, pos, *caches, *factors)
    q_pe = rope_q.outputs[0]
    made = Node("MLA_ROPE_SET_ROWS", inputs, (q_pe, *caches), {**rope_q.params, **params, "has_ff": bool(factors)})
    reads = dataclasses.replace(attention, inputs=(first, cache_k, cache_v, pos, q_pe), params={**attention.params, "split_q": True})
    return gone, [made, reads]


def as_mat_vec(nodes: Nodes) -> Nodes:
    """Every mat-vec in its fused form, so that the passes after this one see one op. Batches stay what they are."""
    roles = {"MUL_MAT": ("w", "x"), "MUL_MAT_ID": ("w", "x", "ids")}
    taken = [n.op in roles and not (n.op == "MUL_MAT" and is_batched(n)) for n in nodes]
    return [Node("MAT_VEC", n.inputs, n.outputs, {**n.params, "roles": roles[n.op]}) if t else n for t, n in zip(taken, nodes, strict=True)]


def inputs_by_role(mat_vec: Node) -> dict[str, Tensor]:
    """Inputs of a MAT_VEC node."""
    return dict(zip(mat_vec.params["roles"], mat_vec.inputs, strict=True))


def _mat_vec(by: Mapping[str, Tensor], out: Tensor, params: Mapping[str, Any]) -> Node:
    """A MAT_VEC node with these inputs by role."""
    roles = tuple(r for r in ("w", "x", *FUSED_ROLES) if r in by)
    return Node("MAT_VEC", tuple(by[r] for r in roles), (out,), {**params, "roles": roles})


def activated(mat_vec: Node) -> bool:
    """Whether a MAT_VEC applies an activation to its sums."""
    return bool(mat_vec.params.get("glu") or mat_vec.params.get("gelu"))


def fuse_bias(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """ADD of a 1-D weight to a mat-vec, ADD_ID of the experts' biases to theirs."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op not in ("ADD", "ADD_ID") or node.inputs[1].kind != "weight":
            return None
        mat_vec = index.made_by(node.inputs[0], "MAT_VEC")
        if mat_vec is None:
            return None
        by = inputs_by_role(mat_vec)
        routed = node.inputs[2].name if node.op == "ADD_ID" else None
        if not by.keys() <= {"w", "x", "ids"} or (by["ids"].name if "ids" in by else None) != routed:
            return None
        out = dataclasses.replace(node.outputs[0], shape=mat_vec.outputs[0].shape)
        return [mat_vec, node], _mat_vec(by | {"bias": node.inputs[1]}, out, mat_vec.params)

    return _rewrite(nodes, outputs, match)


def fuse_glu(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """SWIGLU, SWIGLU_OAI or GEGLU of two mat-vecs of the same x, each with a bias or neither -> one mat-vec with gate and up rows in
    turn."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op not in ("SWIGLU", "SWIGLU_OAI", "GEGLU") or len(node.inputs) != 2:
            return None
        gate, up = (index.made_by(t, "MAT_VEC") for t in node.inputs)
        if gate is None or up is None or gate is up or gate.params.get("glu") or up.params.get("glu"):
            return None
        by, other = inputs_by_role(gate), inputs_by_role(up)
        if by.keys() != other.keys() or not by.keys() <= {"w", "x", "bias", "ids"}:
            return None
        if any(by[role].name != other[role].name for role in by.keys() & {"x", "ids"}):
            return None
        if (by["w"].type, by["w"].shape) != (other["w"].type, other["w"].shape):
            return None
        by |= {role: combine("interleave", (by[role], other[role])) for role in by.keys() & {"w", "bias"}}
        gelu = {"gelu": True} if node.op == "GEGLU" else {}
        return [gate, up, node], _mat_vec(by, node.outputs[0], {**node.params, "glu": True, **gelu})

    return _rewrite(nodes, outputs, match)


def fuse_gelu(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """GELU of a mat-vec with a bias or none."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        mat_vec = index.made_by(node.inputs[0], "MAT_VEC") if node.op == "GELU" else None
        if mat_vec is None or activated(mat_vec) or not {"w", "x", "bias"} >= set(mat_vec.params["roles"]):
            return None
        return [mat_vec, node], _mat_vec(inputs_by_role(mat_vec), node.outputs[0], {**mat_vec.params, "gelu": True})

    return _rewrite(nodes, outputs, match)


def fuse_experts(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """MOE_REDUCE of a mat-vec by routed experts -> the mat-vec summed over its experts."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "MOE_REDUCE" or len(node.inputs) != 2:
            return None
        mat_vec = index.made_by(node.inputs[0], "MAT_VEC")
        if mat_vec is None or activated(mat_vec):
            return None
        by = inputs_by_role(mat_vec)
        if "ids" not in by or not by.keys() <= {"w", "x", "bias", "ids"}:
            return None
        return [mat_vec, node], _mat_vec(by | {"expert_weights": node.inputs[1]}, node.outputs[0], mat_vec.params)

    return _rewrite(nodes, outputs, match)


def fuse_residual(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """ADD of a same-shaped activation to a mat-vec (bias and expert sum included)."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "ADD" or node.inputs[1].kind == "weight":
            return None
        for mine, other in (node.inputs, node.inputs[::-1]):
            mat_vec = index.made_by(mine, "MAT_VEC")
            if mat_vec is None or activated(mat_vec) or prod(mine.shape) != prod(other.shape):
                continue
            by = inputs_by_role(mat_vec)
            if "residual" in by or ("ids" in by and "expert_weights" not in by):
                continue
            return [mat_vec, node], _mat_vec(by | {"residual": other}, node.outputs[0], mat_vec.params)
        return None

    return _rewrite(nodes, outputs, match)


def combine(how: Literal["concat", "interleave"], weights: Sequence[Tensor]) -> Tensor:
    """Several weights as one: rows stacked ("concat") or in turn ("interleave")."""
    sources = tuple(s for w in weights for s in (w.recipe.sources if w.recipe else (w.name,)))
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    axis = max(len(first.shape) - 2, 0)
    rows = sum(w.shape[axis] for w in weights)
    shape = (*first.shape[:axis], rows, *first.shape[axis + 1 :])
    return Tensor("+".join(w.name for w in weights), first.type, shape, "weight", Recipe(how, sources))


def pack_qkv(nodes: Nodes, into_attention: bool) -> Nodes:
    """The three mat-vecs of attention write one packed tensor [n, q + k + v rows]; neighbours of one type become one mat-vec.

    into_attention  rope and cache store move into the attention kernel (ATTN_DECODE, one token)
    """
    for fused in [n for n in nodes if n.op == "QKV_ROPE_SET_ROWS"]:
        index = Index(nodes)
        mat_vecs = [index.producer.get(t.name) for t in fused.inputs[:3]]
        if any(p is None or p.op != "MAT_VEC" or len(index.consumers[p.name]) != 1 for p in mat_vecs):
            continue
        made = [p for p in mat_vecs if p is not None]
        if len({p.inputs[1].name for p in made}) != 1 or not all({"w", "x", "bias"} >= set(p.params["roles"]) for p in made):
            continue  # also where adapters are added to a product
        n, heads, head_dim = fused.inputs[0].shape
        kv_heads = fused.inputs[1].shape[1]
        rows = [p.inputs[0].shape[0] for p in made]
        packed = Tensor(f"{fused.outputs[0].name}.qkv", "F32", (n, sum(rows)))
        parts: list[Node] = []
        for run in _runs(made):
            weights = [p.inputs[0] for p in run]
            biases = [p.inputs[2] for p in run if len(p.inputs) > 2]
            row0 = sum(rows[: made.index(run[0])])
            inputs = (combine("concat", weights), run[0].inputs[1], *((combine("concat", biases),) if biases else ()))
            roles = ("w", "x", *(("bias",) if biases else ()))
            parts.append(Node("MAT_VEC", inputs, (packed,), {"roles": roles, "row0": row0, "rows_total": sum(rows)}))
        params = {**fused.params, "packed": True, "n_head": heads, "n_head_kv": kv_heads, "head_dim": head_dim}
        attention = next(a for a in index.consumers[fused.outputs[0].name] if a.op == "FLASH_ATTN_EXT")
        tail: list[Node]
        if into_attention:
            params.pop("packed")
            outputs = (attention.outputs[0], *fused.outputs[1:])
            pos, cache_k, cache_v, *extra = fused.inputs[3:]
            norms, factors = extra[: 2 * params["has_norm"]], extra[2 * params["has_norm"] :]
            angles = [angles_node(nodes, pos, factors, params)] if params["n_dims"] else []
            inputs = (packed, pos, cache_k, cache_v, *(a.outputs[0] for a in angles), *norms, *attention.inputs[4:])
            tail = [*angles, Node("ATTN_DECODE", inputs, outputs, {**params, **attention.params})]
            tail = [n for n in tail if not any(n is there for there in nodes)]
            nodes = replace(nodes, [*made, fused, attention], [*parts, *tail])
        else:
            nodes = replace(nodes, [*made, fused], [*parts, Node(fused.op, (packed, *fused.inputs[3:]), fused.outputs, params)])
    return nodes


def angles_node(nodes: Sequence[Node], pos: Tensor, factors: Sequence[Tensor], params: Mapping[str, Any]) -> Node:
    """The node that makes the angles of a rotation: the one there is, else a new one."""
    inputs = (pos, *factors)
    rope = {key: params[key] for key in rope_angles.PARAMS}
    present = [n for n in nodes if n.op == "ROPE_ANGLES"]
    for node in present:
        if node.inputs == inputs and node.params == rope:
            return node
    angles = Tensor(f"rope_angles.{len(present)}", "F32", (pos.elements, params["n_dims"] // 2, 2))
    return Node("ROPE_ANGLES", inputs, (angles,), rope)


def _runs(mat_vecs: Sequence[Node]) -> list[list[Node]]:
    """Neighbours whose weights have one type and which agree on having a bias."""
    runs: list[list[Node]] = []
    for p in mat_vecs:
        if runs and runs[-1][0].inputs[0].type == p.inputs[0].type and len(runs[-1][0].inputs) == len(p.inputs):
            runs[-1].append(p)
        else:
            runs.append([p])
    return runs


def _x_path(node: Node, ctx: LowerContext) -> Path:
    return MatVecNode.of(node).path(ctx)[0]


def norms_into_prologue(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """RMS_NORM_MUL or NORM_MUL_ADD read only by mat-vecs: each norms x itself in its prologue, which costs no stage."""
    index = Index(nodes, outputs)
    for norm in [n for n in nodes if n.op in ("RMS_NORM_MUL", "NORM_MUL_ADD")]:
        readers = index.consumers.get(norm.name, [])
        if norm.name in index.outputs or not readers or any(r.op != "MAT_VEC" or r.inputs[1].name != norm.name for r in readers):
            continue
        n, k = prod(norm.outputs[0].shape[:-1]), norm.outputs[0].shape[-1]
        weights = dict(zip(("norm", "norm_bias"), norm.inputs[1:], strict=False))
        if any(prologue_problem(r.inputs[0].type, k, n, _x_path(r, ctx), ctx, _bindings(r) + len(weights)) for r in readers):
            continue
        nodes = [n for n in nodes if n is not norm]
        for r in readers:
            x = dataclasses.replace(norm.inputs[0], shape=r.inputs[1].shape)
            new = _mat_vec(inputs_by_role(r) | {"x": x, **weights}, r.outputs[0], {**r.params, "eps": norm.params["eps"]})
            nodes = [new if n is r else n for n in nodes]
        index = Index(nodes, outputs)
    return nodes


def _bindings(mat_vec: Node) -> int:
    return bindings(MatVecNode.of(mat_vec))


def post_norms_into_prologue(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """RMS_NORM_MUL_ADD whose result mat-vecs norm in their prologue: they make it themselves, all before that norm. The first of them
    stores it for who else reads it, which is behind them."""
    index = Index(nodes, outputs)
    for post in [n for n in nodes if n.op == "RMS_NORM_MUL_ADD"]:
        x, w, residual = post.inputs
        readers = [r for r in index.consumers.get(post.name, []) if r.op == "MAT_VEC" and r.inputs[1].name == post.name]
        roles = [r.params["roles"] for r in readers]
        able = all("norm" in r and not {"norm_bias", "post_norm", "logits"} & set(r) for r in roles)
        same_eps = all(r.params.get("eps") == post.params["eps"] for r in readers)
        read_as_more = any(t.name == post.name for r in readers for t in r.inputs[2:])
        fit = all(_bindings(r) + 3 <= ctx.caps.max_storage_bindings for r in readers)
        if not (readers and able and same_eps and fit) or read_as_more:
            continue
        # Who else reads the sum must come behind the mat-vec that stores it.
        first = next(i for i, n in enumerate(nodes) if any(n is r for r in readers))
        others = [i for i, n in enumerate(nodes) if any(t.name == post.name for t in n.inputs) and not any(n is r for r in readers)]
        if any(i < first for i in others):
            continue
        stored = bool(others) or post.name in index.outputs
        nodes = [n for n in nodes if n is not post]
        for i, r in enumerate(readers):
            by = inputs_by_role(r)
            shape = by["x"].shape
            by |= {
                "x": dataclasses.replace(x, shape=shape), "post_norm": w, "post_residual": dataclasses.replace(residual, shape=shape),
            }  # fmt: skip
            new = _mat_vec(by, r.outputs[0], r.params)
            if stored and i == 0:
                new = dataclasses.replace(new, outputs=(*r.outputs, post.outputs[0]), params={**new.params, "sum": True})
            nodes = [new if n is r else n for n in nodes]
        index = Index(nodes, outputs)
    return nodes


def fuse_router(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """MAT_VEC with its norm, read by TOPK_MOE alone -> MOE_ROUTER."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        mat_vec = index.made_by(node.inputs[0], "MAT_VEC") if node.op == "TOPK_MOE" else None
        if mat_vec is None or mat_vec.params["roles"] not in (("w", "x", "norm"), ("w", "x", "norm", "bias")):
            return None
        if mat_vec.params.get("glu") or "rows_total" in mat_vec.params or router_problem(mat_vec.inputs[0], mat_vec.inputs[1], ctx):
            return None
        bias = node.inputs[1:]
        roles = (*mat_vec.params["roles"], *(["selection_bias"] if bias else []))
        params = {"roles": roles, "eps": mat_vec.params["eps"], **topk_params(node.params)}
        return [mat_vec, node], Node("MOE_ROUTER", (*mat_vec.inputs, *bias), node.outputs, params)

    return _rewrite(nodes, outputs, match)


def fuse_choice(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """TOPK_MOE read by one mat-vec with an output for each expert, and by mat-vecs that sum these -> the first chooses the experts and
    stores their ids and weights for the others. It is the last pass: what else the mat-vec needs shared memory for is known by then."""
    for choice in [n for n in nodes if n.op == "TOPK_MOE"]:
        index = Index(nodes, outputs)
        weights, ids = choice.outputs
        readers = [r for r in index.consumers.get(ids.name, []) if r.op == "MAT_VEC" and "expert_weights" not in r.params["roles"]]
        if len(readers) != 1:
            continue
        (mat_vec,) = readers
        later = [r for t in (weights, ids) for r in index.consumers.get(t.name, []) if r is not mat_vec]
        made = {mat_vec.name, *(r.name for r in index.consumers.get(mat_vec.name, []) if r.op == "QUANTIZE_Q8_1")}
        if any(r.op != "MAT_VEC" or made.isdisjoint(t.name for t in r.inputs) for r in later):
            continue
        by = inputs_by_role(mat_vec) | dict(zip(("logits", "selection_bias"), choice.inputs, strict=False))
        if by.pop("ids").name != ids.name or mat_vec.params.get("sum"):
            continue
        roles = tuple(r for r in ("w", "x", *FUSED_ROLES) if r in by)
        params = {**mat_vec.params, "roles": roles, **topk_params(choice.params)}
        fused = Node("MAT_VEC", tuple(by[r] for r in roles), (*mat_vec.outputs, *choice.outputs), params)
        if not choice_problem(fused, ctx):
            nodes = replace(nodes, [choice, mat_vec], [fused])
    return nodes


ATTENTION = frozenset({"FLASH_ATTN_EXT", "ATTN_DECODE"})

QUANTIZING = ATTENTION | {"RMS_NORM_MUL", "RMS_NORM_MUL_ADD", "NORM_MUL_ADD", "SWIGLU", "SWIGLU_OAI", "GEGLU", "MAT_VEC_HEADS"}
"""Ops that can leave their first output as Q8_1: attention where a head of V is whole units of 32."""


def quantize_activations(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext, *, by: str) -> Nodes:
    """Give every x of an integer-dot mat-vec as Q8_1: stored so by its producer when nobody else reads it, else quantized once.

    by  "producer": any that can; "attention": attention and products by heads, but no other mat-vec; "stage": none
    """
    index = Index(nodes, outputs)
    out: Nodes = list(nodes)
    for tensor in [t for n in nodes for t in n.outputs if t.type == "F32"]:
        readers = index.consumers.get(tensor.name, [])
        wants = [r for r in readers if r.op in ("MAT_VEC", "MAT_VEC_HEADS") and r.inputs[1].name == tensor.name
                 and "norm" not in r.params.get("roles", ()) and x_wanted(r, ctx) == "Q8_1"]
        if not wants:
            continue
        producer = index.producer[tensor.name]
        caches = [t for t in producer.inputs if t.kind == "state"] if producer.op in ATTENTION else []
        whole_units = not caches or producer.params.get("v_dim", caches[-1].shape[-1]) % 32 == 0
        by_mat_vec = producer.op == "MAT_VEC" and activated(producer)
        can = {"producer": producer.op in QUANTIZING or by_mat_vec, "attention": producer.op in QUANTIZING, "stage": False}[by]
        sole = len(wants) == len(readers) and tensor.name not in index.outputs and producer.outputs[0].name == tensor.name
        if can and sole and whole_units and tensor.shape[-1] % 32 == 0:
            out = [_retyped(n, tensor.name, tensor.name) if n is producer or n in wants else n for n in out]
        else:
            quantized = f"{tensor.name}.q8_1"
            at = next(i for i, n in enumerate(out) if n is producer)
            rows = wants[0].inputs[1]  # a token's values are a row, whatever the shape they were made in
            out.insert(at + 1, Node("QUANTIZE_Q8_1", (rows,), (dataclasses.replace(rows, name=quantized, type="Q8_1"),)))
            out = [_retyped(n, tensor.name, quantized) if n in wants else n for n in out]
        index = Index(out, outputs)
    return out


def _retyped(node: Node, name: str, new_name: str) -> Node:
    def swap(t: Tensor) -> Tensor:
        return dataclasses.replace(t, name=new_name, type="Q8_1") if t.name == name else t

    return dataclasses.replace(node, inputs=tuple(map(swap, node.inputs)), outputs=tuple(map(swap, node.outputs)))

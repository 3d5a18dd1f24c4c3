"""Fusion into GEMVs: what becomes of their sums (bias, GLU, GELU, experts, residual), norms of their x, and x as Q8_1."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from vkback.graph import Node, Recipe, Tensor
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.batched import is_batched
from vkback.ops.matmul.choice import choice_of
from vkback.ops.matmul.gemv import prologue_problem
from vkback.ops.matmul.linear_node import FUSED_ROLES, LinearNode, LinearParams, Path, bindings, inputs_by_role
from vkback.ops.view import View
from vkback.plan.nodes import Index, Nodes, rewrite
from vkback.plan.passes.choose import as_stored


def as_linear(nodes: Nodes) -> Nodes:
    """Every GEMV in its fused form, so that the passes after this one see one op. Batches stay what they are."""
    roles = {"MUL_MAT": ("w", "x"), "MUL_MAT_ID": ("w", "x", "ids")}
    taken = [n.op in roles and not (n.op == "MUL_MAT" and is_batched(n)) for n in nodes]
    return [Node("LINEAR", n.inputs, n.outputs, {**n.params, "roles": roles[n.op]}) if t else n for t, n in zip(taken, nodes, strict=True)]


def _gemv(by: Mapping[str, Tensor], out: Tensor, params: Mapping[str, Any], choice: object = None) -> Node:
    """A LINEAR node with these inputs by role."""
    roles = tuple(r for r in ("w", "x", *FUSED_ROLES) if r in by)
    return Node("LINEAR", tuple(by[r] for r in roles), (out,), {**params, "roles": roles}, choice)


def activated(gemv: Node) -> bool:
    """Whether a LINEAR applies an activation to its sums."""
    return LinearParams.of(gemv.params).activates


def fuse_bias(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """ADD of a 1-D weight to a GEMV, ADD_ID of the experts' biases to theirs."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op not in ("ADD", "ADD_ID") or node.inputs[1].kind != "weight":
            return None
        gemv = index.one_use_producer(node.inputs[0], "LINEAR")
        if gemv is None:
            return None
        by = inputs_by_role(gemv)
        routed = node.inputs[2].name if node.op == "ADD_ID" else None
        if not by.keys() <= {"w", "x", "ids"} or (by["ids"].name if "ids" in by else None) != routed:
            return None
        out = dataclasses.replace(node.outputs[0], shape=gemv.outputs[0].shape)
        return [gemv, node], _gemv(by | {"bias": node.inputs[1]}, out, gemv.params)

    return rewrite(nodes, outputs, match)


def fuse_glu(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """SWIGLU, SWIGLU_OAI or GEGLU of two GEMVs of the same x, each with a bias or neither -> one GEMV with gate and up rows in
    turn."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op not in ("SWIGLU", "SWIGLU_OAI", "GEGLU") or len(node.inputs) != 2:
            return None
        gate, up = (index.one_use_producer(t, "LINEAR") for t in node.inputs)
        if gate is None or up is None or gate is up or activated(gate) or activated(up):
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
        return [gate, up, node], _gemv(by, node.outputs[0], {**node.params, "glu": True, **gelu})

    return rewrite(nodes, outputs, match)


def fuse_multiplier(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """GEGLU of a GEMV, scaled or not, and of what no GEMV makes -> the GEMV with gelu, times the other, which may be a part of a row."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "GEGLU" or len(node.inputs) != 2:
            return None
        scale = index.one_use_producer(node.inputs[0], "SCALE")
        scale = scale if scale is not None and scale.params["bias"] == 0.0 else None
        gemv = index.one_use_producer(scale.inputs[0] if scale is not None else node.inputs[0], "LINEAR")
        other = index.producer.get(node.inputs[1].name)
        if gemv is None or gemv.params["roles"] != ("w", "x") or activated(gemv) or (other is not None and other.op == "LINEAR"):
            return None
        params = {**gemv.params, "gelu": True} | ({"gelu_scale": scale.params["scale"]} if scale is not None else {})
        multiplier = dataclasses.replace(node.inputs[1], shape=node.outputs[0].shape)
        gone = [gemv, *([scale] if scale is not None else []), node]
        part = index.one_use_producer(node.inputs[1], "CONT")
        view = part.params.get("view") if part is not None else None
        if part is not None and view is not None and view == View(view.offset, multiplier.shape, (part.inputs[0].elements, 1)):
            multiplier, params = part.inputs[0], {**params, "multiplier_at": view.offset}
            gone.append(part)
        return gone, _gemv(inputs_by_role(gemv) | {"multiplier": multiplier}, node.outputs[0], params)

    return rewrite(nodes, outputs, match)


def fuse_gelu(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """GELU of a GEMV with a bias or none."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        gemv = index.one_use_producer(node.inputs[0], "LINEAR") if node.op == "GELU" else None
        if gemv is None or activated(gemv) or not {"w", "x", "bias"} >= set(gemv.params["roles"]):
            return None
        return [gemv, node], _gemv(inputs_by_role(gemv), node.outputs[0], {**gemv.params, "gelu": True})

    return rewrite(nodes, outputs, match)


def fuse_squared_relu(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """RELU and SQR of a GEMV of one token, by experts or not, with a bias or none -> the GEMV with a squared ReLU."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        relu = index.one_use_producer(node.inputs[0], "RELU") if node.op == "SQR" and node.outputs[0].shape[0] == 1 else None
        gemv = index.one_use_producer(relu.inputs[0], "LINEAR") if relu is not None else None
        if relu is None or gemv is None or activated(gemv) or not {"w", "x", "bias", "ids"} >= set(gemv.params["roles"]):
            return None
        return [gemv, relu, node], _gemv(inputs_by_role(gemv), node.outputs[0], {**gemv.params, "squared_relu": True})

    return rewrite(nodes, outputs, match)


def fuse_softcap(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """SCALE by 1 / c, TANH and SCALE by c of a GEMV of one token, with a bias or none -> the GEMV with a softcap."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "SCALE" or node.params["bias"] != 0.0 or prod(node.outputs[0].shape[:-1]) != 1:
            return None
        tanh = index.one_use_producer(node.inputs[0], "TANH")
        before = index.one_use_producer(tanh.inputs[0], "SCALE") if tanh is not None else None
        gemv = index.one_use_producer(before.inputs[0], "LINEAR") if before is not None else None
        if tanh is None or before is None or gemv is None or activated(gemv) or not {"w", "x", "bias"} >= set(gemv.params["roles"]):
            return None
        cap = float(node.params["scale"])
        if not cap > 0.0 or before.params != {"scale": 1.0 / cap, "bias": 0.0}:
            return None
        return [gemv, before, tanh, node], _gemv(inputs_by_role(gemv), node.outputs[0], {**gemv.params, "softcap": cap})

    return rewrite(nodes, outputs, match)


def fuse_experts(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """MOE_REDUCE of a GEMV by routed experts -> the GEMV summed over its experts."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "MOE_REDUCE" or len(node.inputs) != 2:
            return None
        gemv = index.one_use_producer(node.inputs[0], "LINEAR")
        if gemv is None or activated(gemv):
            return None
        by = inputs_by_role(gemv)
        if "ids" not in by or not by.keys() <= {"w", "x", "bias", "ids"}:
            return None
        return [gemv, node], _gemv(by | {"expert_weights": node.inputs[1]}, node.outputs[0], gemv.params)

    return rewrite(nodes, outputs, match)


def fuse_residual(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """ADD of a same-shaped activation to a GEMV (bias and expert sum included)."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "ADD" or node.inputs[1].kind == "weight":
            return None
        for mine, other in (node.inputs, node.inputs[::-1]):
            gemv = index.one_use_producer(mine, "LINEAR")
            if gemv is None or activated(gemv) or prod(mine.shape) != prod(other.shape):
                continue
            by = inputs_by_role(gemv)
            if "residual" in by or ("ids" in by and "expert_weights" not in by):
                continue
            return [gemv, node], _gemv(by | {"residual": other}, node.outputs[0], gemv.params)
        return None

    return rewrite(nodes, outputs, match)


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


def _x_path(node: Node, ctx: LowerContext) -> Path:
    return choice_of(LinearNode.of(node), ctx).path


def norms_into_prologue(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """RMS_NORM_MUL or NORM_MUL_ADD read only by GEMVs: each norms x itself in its prologue, which costs no stage."""
    index = Index(nodes, outputs)
    for norm in [n for n in nodes if n.op in ("RMS_NORM_MUL", "NORM_MUL_ADD")]:
        readers = index.consumers.get(norm.name, [])
        if norm.name in index.outputs or not readers or any(r.op != "LINEAR" or r.inputs[1].name != norm.name for r in readers):
            continue
        n, k = prod(norm.outputs[0].shape[:-1]), norm.outputs[0].shape[-1]
        weights = dict(zip(("norm", "norm_bias"), norm.inputs[1:], strict=False))
        if any(prologue_problem(r.inputs[0].type, k, n, _x_path(r, ctx), ctx, _bindings(r) + len(weights)) for r in readers):
            continue
        nodes = [n for n in nodes if n is not norm]
        for r in readers:
            x = dataclasses.replace(norm.inputs[0], shape=r.inputs[1].shape)
            new = _gemv(inputs_by_role(r) | {"x": x, **weights}, r.outputs[0], {**r.params, "eps": norm.params["eps"]}, r.choice)
            nodes = [new if n is r else n for n in nodes]
        index.update(nodes)
    return nodes


def _bindings(gemv: Node) -> int:
    return bindings(LinearNode.of(gemv))


def post_norms_into_prologue(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """Move a post-norm and its residual into the prologue of the products that read the result, or its norm. The first product also writes
    the sum, for later readers."""
    index = Index(nodes, outputs)
    for post in [n for n in nodes if n.op == "RMS_NORM_MUL_ADD"]:
        x, w, residual = post.inputs
        readers = [r for r in index.consumers.get(post.name, []) if r.op == "LINEAR" and r.inputs[1].name == post.name]
        roles = [r.params["roles"] for r in readers]
        able = all(not {"norm_bias", "post_norm", "logits", *(() if "norm" in r else ("ids",))} & set(r) for r in roles)
        same_eps = all(r.params.get("eps", post.params["eps"]) == post.params["eps"] for r in readers)
        read_as_more = any(t.name == post.name for r in readers for t in r.inputs[2:])
        n, k = prod(post.outputs[0].shape[:-1]), post.outputs[0].shape[-1]
        fit = not any(prologue_problem(r.inputs[0].type, k, n, _x_path(r, ctx), ctx, _bindings(r) + 3) for r in readers)
        if not (readers and able and same_eps and fit) or read_as_more:
            continue
        # Who else reads the sum must come behind the GEMV that stores it.
        first = next(i for i, n in enumerate(nodes) if any(n is r for r in readers))
        others = [i for i, n in enumerate(nodes) if any(t.name == post.name for t in n.inputs) and not any(n is r for r in readers)]
        if any(i < first for i in others):
            continue
        stored = bool(others) or post.name in index.outputs
        nodes = [n for n in nodes if n is not post]
        for i, r in enumerate(readers):
            by = inputs_by_role(r)
            shape = by["x"].shape
            by |= {"x": dataclasses.replace(x, shape=shape), "post_norm": w, "post_residual": dataclasses.replace(residual, shape=shape)}
            new = _gemv(by, r.outputs[0], {**r.params, "eps": post.params["eps"]}, r.choice)
            if stored and i == 0:
                new = dataclasses.replace(new, outputs=(*r.outputs, post.outputs[0]), params={**new.params, "sum": True})
            nodes = [new if n is r else n for n in nodes]
        index = Index(nodes, outputs)
    return nodes


ATTENTION = frozenset({"FLASH_ATTN_EXT", "ATTN_DECODE"})

GLUS = frozenset({"SWIGLU", "SWIGLU_OAI", "SIGMOID_GLU", "GEGLU"})

NORMS = frozenset({"RMS_NORM_MUL", "RMS_NORM_MUL_ADD", "RMS_NORM_MUL_GROUPS", "RMS_NORM_PAIR", "NORM_MUL_ADD"})

OF_ONE_TOKEN = frozenset({"SHORT_CONV"})
"""Ops that leave it so of one token alone: with `exact`, where many tokens have the kernels of one, they do not."""

QUANTIZING = ATTENTION | GLUS | NORMS | OF_ONE_TOKEN | {"LINEAR_HEADS", "CONV_DELTA_NET", "GAUSSIAN_GEGLU", "ALTUP_CORRECT_ROUTED"}
"""Ops that can leave an output as Q8_1: attention where a head of V is whole units of 32, a delta net where a head is."""

Q8_1_OUTPUT = {"ALTUP_CORRECT_ROUTED": 2}
"""Which output that is, where it is not the first."""


def quantize_activations(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext, *, by: str) -> Nodes:
    """Give every x of an integer-dot GEMV as Q8_1: stored so by its producer when nobody else reads it, else quantized once.

    by  "producer": any that can; "attention": attention and products by heads, but no other GEMV; "stage": none
    """
    kept = frozenset(outputs)
    made_at = {t.name: i for i, n in enumerate(nodes) for t in n.outputs}
    read_at: dict[str, list[int]] = {}
    for i, n in enumerate(nodes):
        for t in n.inputs:
            read_at.setdefault(t.name, []).append(i)
    out: Nodes = list(nodes)
    behind: dict[int, list[Node]] = {}  # what quantizes the outputs of the node at a place
    for tensor in [t for n in nodes for t in n.outputs if t.type == "F32"]:
        readers = read_at.get(tensor.name, [])
        wants = [
            i
            for i in readers
            if (r := out[i]).op in ("LINEAR", "LINEAR_HEADS")
            and r.inputs[1].name == tensor.name
            and not {"norm", "post_norm"} & set(r.params.get("roles", ()))
            and choice_of(LinearNode.of(r), ctx).x_type == "Q8_1"
        ]
        if not wants:
            continue
        at = made_at[tensor.name]
        producer = out[at]
        whole_units = _head_width(producer) % 32 == 0
        by_gemv = producer.op == "LINEAR" and activated(producer)
        quantizes = producer.op in QUANTIZING and (producer.op not in OF_ONE_TOKEN or (tensor.shape[0] == 1 and not ctx.exact))
        can = {"producer": quantizes or by_gemv, "attention": quantizes, "stage": False}[by]
        # If anything else reads the floats, they must be stored, too.
        stored = producer.outputs[Q8_1_OUTPUT.get(producer.op, 0)].name == tensor.name
        sole = len(wants) == len(readers) and tensor.name not in kept and stored
        if can and sole and whole_units and tensor.shape[-1] % 32 == 0:
            name = tensor.name
            out[at] = as_stored(_retyped(producer, name, name), ctx)
        else:
            # Round once, right behind the producer, for all products that read it.
            name = f"{tensor.name}.q8_1"
            rows = out[wants[0]].inputs[1]  # a token's values are a row, whatever the shape they were made in
            rounded = Node("QUANTIZE_Q8_1", (rows,), (dataclasses.replace(rows, name=name, type="Q8_1"),))
            behind.setdefault(at, []).insert(0, rounded)
        for i in wants:
            out[i] = _retyped(out[i], tensor.name, name)
    return [n for i, node in enumerate(out) for n in (node, *behind.get(i, ()))]


def _head_width(node: Node) -> int:
    """Values of a head, or a group, of what an op makes by these: it rounds whole units of 32 of them. 0: of an op without."""
    if node.op == "RMS_NORM_MUL_GROUPS":
        return node.inputs[0].shape[-1]
    states = [t for t in node.inputs if t.kind == "state"]
    if node.op in ATTENTION:
        return int(node.params.get("v_dim", states[-1].shape[-1])) if states else 0
    return states[-1].shape[-2] if node.op == "CONV_DELTA_NET" else 0


def _retyped(node: Node, name: str, new_name: str) -> Node:
    def swap(t: Tensor) -> Tensor:
        return dataclasses.replace(t, name=new_name, type="Q8_1") if t.name == name else t

    return dataclasses.replace(node, inputs=tuple(map(swap, node.inputs)), outputs=tuple(map(swap, node.outputs)))

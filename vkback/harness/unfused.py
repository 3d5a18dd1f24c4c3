"""The chains of plain ops that fused ops stand for: run on the same device, they must give what the fused kernel gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import prod

from vkback.graph import Node, Tensor
from vkback.ops import rope_angles
from vkback.ops.base import OPS, LowerContext, Tolerance
from vkback.ops.router import choice_of, mat_vec_of


def _mat_vec(node: Node) -> list[Node]:
    """Norm, product, bias, GLU, sum over experts, residual, quantization: each a node."""
    by = dict(zip(node.params["roles"], node.inputs, strict=True))
    w, x, out = by["w"], by["x"], node.outputs[0]
    plain = len(node.params["roles"]) == 2 and not node.params.get("glu") and out.type == "F32"
    if plain or node.params.get("rows_total"):
        return []
    chain: list[Node] = []

    def emit(op: str, name: str, shape: tuple[int, ...], *inputs: Tensor, **params: object) -> Tensor:
        made = Tensor(f"{out.name}.{name}", "F32", shape)
        chain.append(Node(op, inputs, (made,), params))
        return made

    n, m = x.shape[0], w.shape[-2]
    if "logits" in by:
        chain.append(choice_of(node, by["logits"]))
        by["ids"] = node.outputs[2]
    lead = by["ids"].shape if "ids" in by else (n,)
    if "norm" in by:
        x = emit("MUL", "normed", x.shape, emit("RMS_NORM", "norm", x.shape, x, eps=node.params["eps"]), by["norm"])
    routed = (by["ids"],) if "ids" in by else ()
    y = emit("MUL_MAT_ID" if routed else "MUL_MAT", "product", (*lead, m), w, x, *routed)
    if "bias" in by:
        y = emit("ADD_ID" if routed else "ADD", "biased", y.shape, y, by["bias"], *routed)
    if node.params.get("glu"):
        pairs = dataclasses.replace(y, shape=(prod(lead), m // 2, 2))
        halves = emit("PERMUTE", "halves", (prod(lead), 2, m // 2), pairs, axes=(0, 2, 1))
        both = dataclasses.replace(halves, shape=(*lead, m))
        clamp = {name: node.params[name] for name in ("alpha", "limit") if name in node.params}
        y = emit("SWIGLU_OAI" if clamp else "SWIGLU", "glu", (*lead, m // 2), both, **clamp)
    if "expert_weights" in by:
        y = emit("MOE_REDUCE", "sum", (n, y.shape[-1]), y, by["expert_weights"])
    if "residual" in by:
        y = emit("ADD", "added", y.shape, y, by["residual"])
    if out.type == "Q8_1":
        return [*chain, Node("QUANTIZE_Q8_1", (y,), (out,))]
    return [*chain[:-1], dataclasses.replace(chain[-1], outputs=(out,))]


def _rms_norm_mul(node: Node) -> list[Node]:
    *terms, w = node.inputs
    out = node.outputs[-1]
    x = node.outputs[0] if len(terms) == 2 else terms[0]
    chain = [Node("ADD", tuple(terms), (x,))] if len(terms) == 2 else []
    normed, scaled = Tensor(f"{out.name}.norm", "F32", out.shape), Tensor(f"{out.name}.scaled", "F32", out.shape)
    q8 = out.type == "Q8_1"
    chain += [Node("RMS_NORM", (x,), (normed,), node.params), Node("MUL", (normed, w), (scaled if q8 else out,))]
    return [*chain, Node("QUANTIZE_Q8_1", (scaled,), (out,))] if q8 else chain


def _qkv_rope_set_rows(node: Node) -> list[Node]:
    """None where q, k and v come as one tensor: no plain op takes a slice."""
    if node.params["packed"]:
        return []
    q, k, v, pos, cache_k, cache_v, *extra = node.inputs
    out = node.outputs[0]
    chain: list[Node] = []
    if node.params["has_norm"]:
        normed = [Tensor(f"{t.name}.normed", "F32", t.shape) for t in (q, k)]
        eps = {"eps": node.params["eps"]}
        chain += [Node("RMS_NORM_MUL", (t, w), (y,), eps) for t, w, y in zip((q, k), extra[:2], normed, strict=True)]
        (q, k), extra = normed, extra[2:]
    params = {key: node.params[key] for key in rope_angles.PARAMS}
    turned = Tensor(f"{k.name}.turned", "F32", k.shape)
    chain += [Node("ROPE", (q, pos, *extra), (out,), params), Node("ROPE", (k, pos, *extra), (turned,), params)]
    return [*chain, Node("SET_ROWS", (turned, pos, cache_k), (cache_k,)), Node("SET_ROWS", (v, pos, cache_v), (cache_v,))]


def _attn_decode(node: Node) -> list[Node]:
    """None with frequency factors: they are in the angles already, and the plain op has no such input."""
    qkv, pos, cache_k, cache_v, _, *extra = node.inputs
    params = node.params
    if params.get("has_ff"):
        return []
    norms = 2 * bool(params.get("has_norm"))
    q = Tensor(f"{node.name}.q", "F32", (1, params["n_head"], params["head_dim"]))
    stored = Node("QKV_ROPE_SET_ROWS", (qkv, pos, cache_k, cache_v, *extra[:norms]), (q, cache_k, cache_v), {**params, "packed": True})
    return [stored, Node("FLASH_ATTN_EXT", (q, cache_k, cache_v, pos, *extra[norms:]), node.outputs[:1], params)]


def _moe_router(node: Node) -> list[Node]:
    product = mat_vec_of(node)
    return [*_mat_vec(product), choice_of(node, product.outputs[0])]


UNFUSED: Mapping[str, Callable[[Node], list[Node]]] = {
    "MAT_VEC": _mat_vec,
    "RMS_NORM_MUL": _rms_norm_mul,
    "ADD_RMS_NORM_MUL": _rms_norm_mul,
    "QKV_ROPE_SET_ROWS": _qkv_rope_set_rows,
    "ATTN_DECODE": _attn_decode,
    "MOE_ROUTER": _moe_router,
}


def unfused(node: Node) -> list[Node]:
    """The plain nodes that make the same outputs; empty when the node is no fusion."""
    chain = UNFUSED.get(node.op)
    return chain(node) if chain else []


EIGHT_BITS = 1e-6
"""A tolerance above this is that of values rounded to eight bits."""


def unfused_tolerance(node: Node, chain: list[Node], ctx: LowerContext) -> Tolerance:
    """How far the fused kernel may be from its chain on the same device."""
    own = OPS[node.op].tolerance(node, ctx)
    parts = [OPS[n.op].tolerance(n, ctx) for n in chain]
    most = max((own, *parts), key=lambda t: t.nmse)
    rounds_at_end = node.outputs[-1].type == "Q8_1" or node.outputs[0].type == "Q8_1"
    if not rounds_at_end and own.nmse > EIGHT_BITS and any(p.nmse > EIGHT_BITS for p in parts):
        return Tolerance(1e-5, 0.05, "both round x to the same eight bits, but for values on the edge between two: one in 10^5")
    return Tolerance(4 * most.nmse, 2 * most.worst, "twice the larger error of the two, fused and chain")

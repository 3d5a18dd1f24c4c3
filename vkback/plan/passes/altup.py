"""Fusion around the streams of AltUp (Gemma 3n; vkback/ops/altup.py) of one token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vkback.graph import Node, Tensor
from vkback.ops.altup_routed import AltUpRouted
from vkback.ops.lowering import LowerContext
from vkback.ops.norm_sum import RmsNormSum
from vkback.ops.op import OPS
from vkback.plan.nodes import Index, Nodes, rewrite


def fuse_altup(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """ALTUP_CORRECT, MUL of its active stream by a weight -> ALTUP_CORRECT with both, where the device binds as many buffers."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        corrected = index.producer.get(node.inputs[0].name) if node.op == "MUL" and node.inputs[1].kind == "weight" else None
        if corrected is None or corrected.op != "ALTUP_CORRECT" or len(corrected.outputs) > 2 or corrected.name != node.inputs[0].name:
            return None
        if len(corrected.inputs) + len(corrected.outputs) + 2 > ctx.caps.max_storage_bindings:
            return None
        inputs, made = (*corrected.inputs, node.inputs[1]), (*corrected.outputs, *node.outputs)
        return [corrected, node], dataclasses.replace(corrected, inputs=inputs, outputs=made)

    return rewrite(nodes, outputs, match)


def fuse_altup_routers(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """The router of ALTUP_PREDICT and ALTUP_CORRECT (norm and product of four rows), the norm of what is added, and norm and residual of
    what corrects -> ALTUP_PREDICT_ROUTED and ALTUP_CORRECT_ROUTED; RMS_NORM_MUL_ADD of (x + RMS_NORM_MUL of x), scaled -> RMS_NORM_SUM;
    GAUSSIAN_TOPK, GEGLU -> GAUSSIAN_GEGLU. Of one token."""

    def routed(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op not in ("ALTUP_PREDICT", "ALTUP_CORRECT"):
            return None
        active, others, logits, coef, *more = node.inputs
        correct = node.op == "ALTUP_CORRECT"
        product = index.one_use_producer(logits, "LINEAR")
        norm = index.one_use_producer(product.inputs[1], "RMS_NORM_MUL") if product is not None and len(product.inputs) == 2 else None
        if product is None or norm is None or len(more) < (2 if correct else 0):
            return None
        made: Node | None = None
        if correct:
            made = index.producer.get(more[0].name)
            readers = index.consumers.get(more[0].name, [])
            if (
                made is None
                or made.op != "RMS_NORM_MUL_ADD"
                or made.name in index.outputs
                or {id(r) for r in readers} != {id(norm), id(node)}
            ):
                return None
        elif more:
            made = index.one_use_producer(more[0], "RMS_NORM_MUL")
            if made is None:
                return None
        if norm.inputs[0].name != (more[0] if correct else active).name or (made is not None and made.params != norm.params):
            return None
        inputs = (active, others, norm.inputs[1], product.inputs[0], coef, *(made.inputs if made is not None else ()), *more[1:])
        inputs = tuple(dataclasses.replace(t, shape=active.shape) if _row(t, active) else t for t in inputs)
        fused = Node(f"{node.op}_ROUTED", inputs, node.outputs, norm.params)
        op = OPS[fused.op]
        if not isinstance(op, AltUpRouted) or op.problem(fused, ctx):
            return None
        return [*([made] if made is not None else []), norm, product, node], fused

    def summed(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        scale = index.one_use_producer(node.inputs[2], "SCALE") if node.op == "RMS_NORM_MUL_ADD" else None
        both = index.one_use_producer(scale.inputs[0], "ADD") if scale is not None and scale.params["bias"] == 0.0 else None
        if scale is None or both is None:
            return None
        for x, normed in (both.inputs, both.inputs[::-1]):
            norm = index.producer.get(normed.name)
            if norm is None or norm.op != "RMS_NORM_MUL" or norm.inputs[0].name != x.name or norm.params != node.params:
                continue
            if not RmsNormSum.fits(x.shape[-1], ctx):
                return None
            inputs = (*node.inputs[:2], x, norm.inputs[1])
            return [scale, both, node], Node("RMS_NORM_SUM", inputs, node.outputs, {**node.params, "scale": scale.params["scale"]})
        return None

    def geglu(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "GEGLU" or len(node.inputs) != 2 or node.inputs[0].shape[-1] % 32:
            return None
        cut = index.one_use_producer(node.inputs[0], "GAUSSIAN_TOPK")
        if cut is None:
            return None
        return [cut, node], Node("GAUSSIAN_GEGLU", (*cut.inputs, node.inputs[1]), node.outputs, cut.params)

    for match in (routed, summed, geglu):
        nodes = rewrite(nodes, outputs, match)
    return nodes


def _row(t: Tensor, like: Tensor) -> bool:
    """Whether it is a row of activations as `like` is one, under another shape."""
    return t.kind != "weight" and t.elements == like.elements and t.shape != like.shape

"""The chain of plain nodes that a LINEAR stands for."""

from __future__ import annotations

import dataclasses
from math import prod

from vkback.graph import Node, Tensor
from vkback.ops.matmul.linear_node import LinearParams, inputs_by_role
from vkback.ops.moe.topk import choice_of
from vkback.ops.view import View


def unfused(node: Node) -> list[Node]:
    """Norm, matrix product, bias, GLU, sum over experts, residual, quantization: each a node. Empty for a node without fusion, and for one
    that makes a part of a wider output."""
    params, by = LinearParams.of(node.params), inputs_by_role(node)
    w, x, out = by["w"], by["x"], node.outputs[0]
    plain = len(params.roles) == 2 and not params.activates and not params.softcap and out.type == "F32"
    if plain or params.rows_total is not None:
        return []
    chain: list[Node] = []

    def emit(op: str, name: str, shape: tuple[int, ...], *inputs: Tensor, **more: object) -> Tensor:
        result = Tensor(f"{out.name}.{name}", "F32", shape)
        chain.append(Node(op, inputs, (result,), more))
        return result

    n, m = x.shape[0], w.shape[-2]
    # The order below is that of the kernel: prologue, product, epilogue.
    if "logits" in by:
        chain.append(choice_of(node, by["logits"], by.get("selection_bias")))
        by["ids"] = node.outputs[2]
    lead = by["ids"].shape if "ids" in by else (n,)
    if "post_norm" in by:
        normed = emit("RMS_NORM", "post_normed", x.shape, x, eps=params.eps)
        weighted = emit("MUL", "post_weighted", x.shape, normed, by["post_norm"])
        x = emit("ADD", "sum", x.shape, weighted, by["post_residual"])
        if params.sum:
            x = node.outputs[1]
            chain[-1] = dataclasses.replace(chain[-1], outputs=(x,))
    if "norm_bias" in by:
        weighted = emit("MUL", "normed", x.shape, emit("NORM", "norm", x.shape, x, eps=params.eps), by["norm"])
        x = emit("ADD", "norm_biased", x.shape, weighted, by["norm_bias"])
    elif "norm" in by:
        x = emit("MUL", "normed", x.shape, emit("RMS_NORM", "norm", x.shape, x, eps=params.eps), by["norm"])
    routed = (by["ids"],) if "ids" in by else ()
    y = emit("MUL_MAT_ID" if routed else "MUL_MAT", "mul_mat", (*lead, m), w, x, *routed)
    if "bias" in by:
        y = emit("ADD_ID" if routed else "ADD", "biased", y.shape, y, by["bias"], *routed)
    # Gate and up rows alternate in the weight: separate them first.
    if params.glu:
        pairs = dataclasses.replace(y, shape=(prod(lead), m // 2, 2))
        halves = emit("PERMUTE", "halves", (prod(lead), 2, m // 2), pairs, axes=(0, 2, 1))
        both = dataclasses.replace(halves, shape=(*lead, m))
        y = emit(params.glu_op, "glu", (*lead, m // 2), both, **params.clamp)
    elif params.gelu:
        if params.gelu_scale != 1.0:
            y = emit("SCALE", "scaled", y.shape, y, scale=params.gelu_scale, bias=0.0)
        y = emit("GELU", "gelu", y.shape, y)
    elif params.squared_relu:
        y = emit("SQR", "squared", y.shape, emit("RELU", "relu", y.shape, y))
    if "expert_weights" in by:
        y = emit("MOE_REDUCE", "sum", (n, y.shape[-1]), y, by["expert_weights"])
    if "multiplier" in by:
        other = by["multiplier"]
        if other.elements != y.elements:
            view = View(params.multiplier_at, y.shape, (other.elements, 1))
            other = emit("CONT", "multiplier", y.shape, other, view=view)
        y = emit("MUL", "multiplied", y.shape, y, other)
    if "residual" in by:
        y = emit("ADD", "added", y.shape, y, by["residual"])
    if params.softcap:
        y = emit("TANH", "tanh", y.shape, emit("SCALE", "in_caps", y.shape, y, scale=1.0 / params.softcap, bias=0.0))
        y = emit("SCALE", "capped", y.shape, y, scale=params.softcap, bias=0.0)
    if out.type == "Q8_1":
        return [*chain, Node("QUANTIZE_Q8_1", (y,), (out,))]
    # The last node writes the output itself.
    return [*chain[:-1], dataclasses.replace(chain[-1], outputs=(out,))]

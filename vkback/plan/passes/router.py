"""Fusion of the choice of experts: into the router's GEMV, or into that of the experts. A gate of one value is a choice of one expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vkback.graph import Node, Tensor
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.gemv import choice_problem
from vkback.ops.matmul.linear_node import FUSED_ROLES, LinearParams, inputs_by_role
from vkback.ops.moe.router import router_problem
from vkback.ops.moe.topk import topk_params
from vkback.plan.nodes import Index, Nodes, replace, rewrite


def gates_as_experts(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """LINEAR times SIGMOID of one value a token -> the LINEAR of one expert, whose weight TOPK_MOE makes of that value. So the product
    takes the gate into its sums, as it does with the weights of experts."""
    index = Index(nodes, outputs)
    for gated in [n for n in nodes if n.op == "MUL" and n.inputs[1].shape[-1] == 1]:
        index.update(nodes)
        gate, gemv = index.one_use_producer(gated.inputs[1], "SIGMOID"), index.one_use_producer(gated.inputs[0], "LINEAR")
        if gate is None or gemv is None or gemv.params["roles"] != ("w", "x") or gate.outputs[0].elements != gemv.outputs[0].shape[0]:
            continue
        w, x = gemv.inputs
        n, name = x.shape[0], gate.name
        weights, ids = Tensor(name, "F32", (n, 1)), Tensor(f"{name}.ids", "I32", (n, 1))
        choice = Node("TOPK_MOE", gate.inputs, (weights, ids), {"n_used": 1, "norm": False, "gating": "sigmoid", "scale": 1.0})
        w, x = dataclasses.replace(w, shape=(1, *w.shape)), dataclasses.replace(x, shape=(n, 1, *x.shape[1:]))
        roles = ("w", "x", "ids", "expert_weights")
        nodes = replace(nodes, [gate, gemv, gated], [choice, Node("LINEAR", (w, x, ids, weights), gated.outputs, {"roles": roles})])
    return nodes


def fuse_router(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext, *, of_one: bool = False) -> Nodes:
    """LINEAR with its norm, read by TOPK_MOE alone -> MOE_ROUTER. of_one: where there is one expert alone."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        gemv = index.one_use_producer(node.inputs[0], "LINEAR") if node.op == "TOPK_MOE" else None
        if gemv is None or (of_one and gemv.inputs[0].shape[0] > 1):
            return None
        if gemv.params["roles"] not in (("w", "x", "norm"), ("w", "x", "norm", "bias")):
            return None
        own = LinearParams.of(gemv.params)
        if own.glu or own.rows_total is not None or router_problem(gemv, ctx):
            return None
        bias = node.inputs[1:]
        roles = (*gemv.params["roles"], *(["selection_bias"] if bias else []))
        params = {"roles": roles, "eps": gemv.params["eps"], **topk_params(node.params)}
        return [gemv, node], Node("MOE_ROUTER", (*gemv.inputs, *bias), node.outputs, params, gemv.choice)

    return rewrite(nodes, outputs, match)


def fuse_choice(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """TOPK_MOE read by one GEMV with an output for each expert, and by GEMVs that sum these -> the first chooses the experts and
    stores their ids and weights for the others. It is the last pass: what else the GEMV needs shared memory for is known by then."""
    index = Index(nodes, outputs)
    for choice in [n for n in nodes if n.op == "TOPK_MOE"]:
        index.update(nodes)
        weights, ids = choice.outputs
        readers = [r for r in index.consumers.get(ids.name, []) if r.op == "LINEAR" and "expert_weights" not in r.params["roles"]]
        if len(readers) != 1:
            continue
        (gemv,) = readers
        later = [r for t in (weights, ids) for r in index.consumers.get(t.name, []) if r is not gemv]
        produced = {gemv.name, *(r.name for r in index.consumers.get(gemv.name, []) if r.op == "QUANTIZE_Q8_1")}
        if any(r.op != "LINEAR" or produced.isdisjoint(t.name for t in r.inputs) for r in later):
            continue
        by = inputs_by_role(gemv) | dict(zip(("logits", "selection_bias"), choice.inputs, strict=False))
        if by.pop("ids").name != ids.name or LinearParams.of(gemv.params).sum:
            continue
        roles = tuple(r for r in ("w", "x", *FUSED_ROLES) if r in by)
        params = {**gemv.params, "roles": roles, **topk_params(choice.params)}
        fused = Node("LINEAR", tuple(by[r] for r in roles), (*gemv.outputs, *choice.outputs), params, gemv.choice)
        if not choice_problem(fused, ctx):
            nodes = replace(nodes, [choice, gemv], [fused])
    return nodes

"""Fusion of the choice of experts: into the router's GEMV, or into that of the experts."""

from __future__ import annotations

from collections.abc import Iterable

from vkback.graph import Node
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.gemv import choice_problem
from vkback.ops.matmul.linear_node import FUSED_ROLES, LinearParams, inputs_by_role
from vkback.ops.moe.router import router_problem
from vkback.ops.moe.topk import topk_params
from vkback.plan.nodes import Index, Nodes, replace, rewrite


def fuse_router(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """LINEAR with its norm, read by TOPK_MOE alone -> MOE_ROUTER."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        gemv = index.one_use_producer(node.inputs[0], "LINEAR") if node.op == "TOPK_MOE" else None
        if gemv is None or gemv.params["roles"] not in (("w", "x", "norm"), ("w", "x", "norm", "bias")):
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
    for choice in [n for n in nodes if n.op == "TOPK_MOE"]:
        index = Index(nodes, outputs)
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

"""Fusion of the choice of experts: into the router's mat-vec, or into that of the experts."""

from __future__ import annotations

from collections.abc import Iterable

from vkback.graph import Node
from vkback.ops.lowering import LowerContext
from vkback.ops.mat_vec_config import choice_problem
from vkback.ops.mat_vec_node import FUSED_ROLES
from vkback.ops.router import router_problem
from vkback.ops.topk import topk_params
from vkback.plan.fuse_mat_vec import inputs_by_role
from vkback.plan.nodes import Index, Nodes, replace, rewrite


def fuse_router(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """MAT_VEC with its norm, read by TOPK_MOE alone -> MOE_ROUTER."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        mat_vec = index.one_use_producer(node.inputs[0], "MAT_VEC") if node.op == "TOPK_MOE" else None
        if mat_vec is None or mat_vec.params["roles"] not in (("w", "x", "norm"), ("w", "x", "norm", "bias")):
            return None
        if mat_vec.params.get("glu") or "rows_total" in mat_vec.params or router_problem(mat_vec.inputs[0], mat_vec.inputs[1], ctx):
            return None
        bias = node.inputs[1:]
        roles = (*mat_vec.params["roles"], *(["selection_bias"] if bias else []))
        params = {"roles": roles, "eps": mat_vec.params["eps"], **topk_params(node.params)}
        return [mat_vec, node], Node("MOE_ROUTER", (*mat_vec.inputs, *bias), node.outputs, params)

    return rewrite(nodes, outputs, match)


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
        produced = {mat_vec.name, *(r.name for r in index.consumers.get(mat_vec.name, []) if r.op == "QUANTIZE_Q8_1")}
        if any(r.op != "MAT_VEC" or produced.isdisjoint(t.name for t in r.inputs) for r in later):
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

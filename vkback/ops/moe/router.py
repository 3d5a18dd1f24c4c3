"""MOE_ROUTER: norm, GEMV with the router's weight, and the choice of experts in one launch (shaders/gemv with TOPK).

    MOE_ROUTER(w [n_expert, k], x F32 [1, k], norm F32 [k], bias F32 [n_expert] or none, selection_bias F32 [n_expert] or none)
              -> weights F32 [1, n_used], ids I32 [1, n_used]
              params: roles and eps as LINEAR has them; the rest as TOPK_MOE has them, whose bias is selection_bias here

Each workgroup takes a ticket when it has stored its logits; the last one reads them all and chooses. None waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import choice as product_choice
from vkback.ops.matmul.choice import ProductChoice, choose
from vkback.ops.matmul.gemv import configure, shared_bytes
from vkback.ops.matmul.linear import Linear, launch
from vkback.ops.matmul.linear_node import LinearNode, inputs_by_role, weight
from vkback.ops.moe.topk import TopkMoe, choice_of, expert_choice
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes, shards


def linear_of(node: Node) -> Node:
    """The GEMV whose results the experts are chosen by: the logits, F32 [1, n_expert]."""
    logits = Tensor(f"{node.name}.logits", "F32", (1, node.inputs[0].shape[0]))
    return Node("LINEAR", node.inputs, (logits,), {k: node.params[k] for k in ("roles", "eps")}, node.choice)


def selection_bias(node: Node) -> Tensor | None:
    """What is added to the values that the experts are ordered by."""
    return inputs_by_role(node).get("selection_bias")


def router_problem(product: Node, ctx: LowerContext) -> str:
    """Why a router's GEMV, a LINEAR, and the choice of experts cannot be one launch; "" when they can."""
    w, x = product.inputs[:2]
    if x.shape[0] != 1:
        return f"it takes one token, got {x.shape[0]}"
    if product_choice.choice_of(LinearNode.of(product), ctx).path != "float":
        return f"logits of {w.type} weights are rounded to 8 bits on the way"
    if len(shards(w, ctx.caps)) != 1:
        return f"{w} does not fit one storage buffer"
    return ""


@register
class MoeRouter(Op):
    """See the module's text."""

    name = "MOE_ROUTER"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        (logits,) = Linear().reference(inputs, {"roles": params["roles"], "eps": params["eps"]})
        bias = [x for role, x in zip(params["roles"], inputs, strict=True) if role == "selection_bias"]
        return TopkMoe().reference([logits, *bias], params)

    def choose(self, node: Node, ctx: LowerContext) -> ProductChoice:
        return choose(LinearNode.of(linear_of(node)), ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        problem = router_problem(linear_of(node), ctx)
        if problem:
            raise PlanError(f"[router] {node.name}: GEMV and choice cannot be one launch: {problem}; give the choice a node of its own")
        gemv = LinearNode.of(linear_of(node))
        config = dataclasses.replace(
            configure(gemv, "float", ctx, routes=True),
            expert_choice=expert_choice(node, gemv.y, ctx, bias=selection_bias(node)),
            last_chooses=True,
            choice_scale=float(node.params["scale"]),
        )
        need = shared_bytes(dataclasses.replace(config, loop_tiles=config.groups is not None))
        if need > ctx.caps.max_shared_memory:
            raise PlanError(
                f"[router] {node.name}: {gemv.m} experts need {need} bytes of shared memory, {ctx.caps.name} has "
                f"{ctx.caps.max_shared_memory}; {config.source} asks for too much"
            )
        dispatch = launch(gemv, config, 0, shards(gemv.w, ctx.caps), f"{config.wg} threads: {config.source}", ctx)
        tickets = Tensor(f"{node.name}.tickets", "I32", (1,), "counter")
        weights, ids = node.outputs
        return [
            dataclasses.replace(
                dispatch,
                args=(*dispatch.args, Arg(weights, "w"), Arg(ids, "w"), Arg(tickets, "rw")),
                op=node.op,
                label=node.name,
                nbytes=dispatch.nbytes + nbytes(weights) + nbytes(ids),
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-9, 1e-4, "f32 sums put logits of up to 20 off by 20 * sqrt(k) * 2^-24, about 5e-5: the error of their exp")

    def cases(self) -> Iterator[Case]:
        for seed, (n_expert, k, n_used, norm, gating, bias) in enumerate(
            (
                (128, 2048, 8, True, "softmax", False),
                (32, 2880, 4, False, "softmax_weight", True),
                (60, 512, 4, False, "softmax", False),
                (9, 256, 9, True, "sigmoid", False),
                (257, 256, 8, False, "sigmoid", True),
            ),
            1,
        ):
            yield self.build_case(n_expert, k, n_used, norm, gating, bias, seed)
        yield self.build_case(64, 256, 6, True, "sigmoid", False, 9, True, 8, 4)
        yield self.build_case(160, 512, 6, False, "softmax", False, 10, False, 8, 3)
        yield self.build_case(64, 256, 6, True, "softmax", False, 11, True)

    def full_cases(self) -> Iterator[Case]:
        experts = ((8, 2), (9, 9), (32, 4), (128, 8), (256, 8), (512, 10))
        gates = (("softmax", False), ("softmax", True), ("softmax_weight", False), ("sigmoid", True))
        for (n_expert, used), k, (gating, norm), bias in product(experts, (256, 2048, 2880), gates, (False, True)):
            yield self.build_case(n_expert, k, used, norm, gating, bias)
        for (n_expert, used), k, norm, groups in product(((64, 6), (256, 8)), (256, 2048), (False, True), ((1, 1), (8, 4))):
            yield self.build_case(n_expert, k, used, norm, "sigmoid", False, 1, True, *groups)

    def build_case(
        self,
        n_expert: int,
        k: int,
        n_used: int,
        norm: bool,
        gating: str,
        bias: bool,
        seed: int = 1,
        selection_bias: bool = False,
        n_group: int = 1,
        n_group_used: int = 1,
    ) -> Case:
        return router_case(n_expert, k, n_used, norm, gating, bias, seed, selection_bias, (n_group, n_group_used))

    def unfused(self, node: Node) -> list[Node]:
        logits = linear_of(node)
        return [*Linear().unfused(logits), choice_of(node, logits.outputs[0], selection_bias(node))]


def router_case(
    n_expert: int,
    k: int,
    n_used: int,
    norm: bool,
    gating: str,
    bias: bool,
    seed: int,
    selects: bool = False,
    groups: tuple[int, int] = (1, 1),
) -> Case:
    """Logits are about 3 in size; that two of the best come within rounding of each other is as good as impossible."""

    grouped = {"n_group": groups[0], "n_group_used": groups[1]} if groups[0] > 1 else {}

    def make(rng: np.random.Generator) -> Problem:
        w, x = weight("w", "F32", (n_expert, k)), Tensor("x", "F32", (1, k), "input")
        roles = ("norm", *(["bias"] if bias else []), *(["selection_bias"] if selects else []))
        extra = [Tensor(role, "F32", (k if role == "norm" else n_expert,), "weight") for role in roles]
        outs = (Tensor("weights", "F32", (1, n_used)), Tensor("ids", "I32", (1, n_used)))
        params = {"roles": ("w", "x", *roles), "eps": 1e-5, "n_used": n_used, "norm": norm, "gating": gating, "scale": 1.5, **grouped}
        values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in (x, *extra)}
        values["w"] = (3 / np.sqrt(k) * rng.standard_normal((n_expert, k))).astype(np.float32).view(np.uint8).reshape(n_expert, -1)
        return Problem(Node("MOE_ROUTER", (w, x, *extra), outs, params), values)

    shown: dict[str, Any] = {"n_expert": n_expert, "k": k, "n_used": n_used, "norm": norm, "gating": gating, "bias": bias, "seed": seed}
    shown |= {"selection_bias": True} if selects else {}
    shown |= grouped
    return Case("MOE_ROUTER", shown, make, seed)

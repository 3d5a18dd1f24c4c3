"""What tuning tables decide for the whole schedule of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.graph import Node
from vkback.ops.family import Choice, declare
from vkback.ops.lowering import LowerContext
from vkback.plan.nodes import tokens_of

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


def schedule_choice(nodes: Sequence[Node], ctx: LowerContext) -> Choice:
    """What the tables say of the schedule of a graph."""
    n_expert = max((node.inputs[0].shape[-1] for node in nodes if node.op == "TOPK_MOE"), default=0)
    return ctx.tuning.pick("schedule", n=tokens_of(nodes), n_expert=n_expert)

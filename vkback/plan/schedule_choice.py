"""What tuning tables decide for the whole schedule of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.graph import Node
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext
from vkback.plan.nodes import tokens_of


def schedule_choice(nodes: Sequence[Node], ctx: LowerContext) -> Choice:
    """What the tables say of the schedule of a graph."""
    n_expert = max((node.inputs[0].shape[-1] for node in nodes if node.op == "TOPK_MOE"), default=0)
    return ctx.tuning.pick("schedule", n=tokens_of(nodes), n_expert=n_expert)

"""How near a fusion must come to the chain of plain ops that it stands for (`Op.unfused`), run on the same device."""

from __future__ import annotations

from vkback.graph import Node
from vkback.ops.case import Tolerance
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS

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

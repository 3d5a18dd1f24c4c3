"""From a graph to a schedule: fuse, drop what nobody reads, lower, group into stages, lay out memory."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.graph import Graph, Node, Tensor
from vkback.ops.base import OPS, Dispatch, LowerContext, PlanError
from vkback.plan.fuse import fuse
from vkback.plan.schedule import Schedule, into_stages, place


def plan(graph: Graph, ctx: LowerContext, *, fusion: str = "all") -> Schedule:
    """The schedule of a graph on one device: a pure function of its arguments.

    fusion  "all" or "none" (each op by itself)
    Raises PlanError naming the node when an op is unknown or cannot run on the device.
    """
    nodes = live(fuse(graph, ctx, level=fusion), graph.outputs)
    dispatches: list[Dispatch] = []
    for node in nodes:
        op = OPS.get(node.op)
        if op is None:
            raise PlanError(f"[plan] {node.name}: op {node.op} has no kernel; known are {', '.join(sorted(OPS))}")
        dispatches.extend(op.lower(node, ctx))
    stages = into_stages(dispatches)
    slots, size = place(stages, [t.name for t in graph.outputs])
    return Schedule(stages, slots, size)


def live(nodes: Sequence[Node], outputs: Sequence[Tensor]) -> list[Node]:
    """Nodes that a graph output or a state (KV cache, generation loop) depends on, in their order."""
    wanted = {t.name for t in outputs}
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(t.name in wanted or t.kind in ("state", "input") for t in node.outputs):
            kept.append(node)
            wanted |= {t.name for t in node.inputs}
    return kept[::-1]

"""Costs and lifetimes of a graph's nodes: what each reads, writes and computes, and how much temporary storage is alive meanwhile.

Temporary storage is counted as if every node had memory of its own: a result is alive from its node to the last one that reads it, in full
even if it is another value under another shape. Views of a state take none, and neither does a result that no node reads (the logits).
What a plan allocates is less: see `vkback plan`.

An input is counted as read from memory by the first node that has it as operand, and not by later ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vkback.graph import Graph, Node, Tensor
from vkback.ops.cost import Cost, total
from vkback.ops.op import cost_rule
from vkback.ops.storage import nbytes

LAYER = re.compile(r"-(\d+)\b|^cache_\w+_l(\d+)\b")


@dataclass(frozen=True)
class Line:
    """One node of a listing.

    layer    the layer that its value is named for; None outside of layers
    cost     by kind
    alive    bytes of temporary storage while it runs, including its own results
    before   lanes of the lifelines that are taken when it begins: one for each value that is alive
    lanes    lanes of its results, in order; None for a result that no node reads
    sources  for each operand its lane (None if no node made it), and whether this is its last use
    """

    node: Node
    layer: int | None
    cost: Cost
    alive: int
    before: tuple[int, ...]
    lanes: tuple[int | None, ...]
    sources: tuple[tuple[int | None, bool], ...]


@dataclass(frozen=True)
class Listing:
    """The nodes of a graph in order, with their sum.

    n_lanes  most values that are alive at once
    """

    lines: tuple[Line, ...]
    n_lanes: int

    @property
    def cost(self) -> dict[str, int]:
        return total(line.cost for line in self.lines)

    @property
    def peak(self) -> int:
        """Most temporary storage alive, in bytes."""
        return max((line.alive for line in self.lines), default=0)

    def of_layers(self, first: int, last: int) -> Listing:
        """The lines of layers first to last - 1."""
        return Listing(tuple(line for line in self.lines if line.layer is not None and first <= line.layer < last), self.n_lanes)

    @property
    def n_layer(self) -> int:
        return 1 + max((line.layer for line in self.lines if line.layer is not None), default=-1)


def listing(graph: Graph, n_kv: int) -> Listing:
    """Costs and lifetimes of a graph's nodes as they are. n_kv: rows of the caches in use, including the batch's."""
    last_use = {t.name: i for i, node in enumerate(graph.nodes) for t in node.inputs if t.kind == "node"}
    views = {t.name for t in _views_of_states(graph.nodes)}
    read: set[str] = set()
    lanes: dict[str, int] = {}
    sizes: dict[str, int] = {}
    lines: list[Line] = []
    layer: int | None = None
    n_lanes = 0
    for i, node in enumerate(graph.nodes):
        before = tuple(sorted(lanes.values()))
        for t in node.outputs:
            if t.kind == "node" and t.name in last_use:
                lanes[t.name] = next(lane for lane in range(len(lanes) + 1) if lane not in lanes.values())
                sizes[t.name] = 0 if t.name in views else nbytes(t)
        n_lanes = max(n_lanes, len(lanes), 1 + max(lanes.values(), default=-1))
        layer = layer_of(node)
        lines.append(
            Line(
                node,
                layer,
                _cost(node, n_kv, views, read),
                sum(sizes.values()),
                before,
                tuple(lanes.get(t.name) if t.kind == "node" else None for t in node.outputs),
                tuple((lanes.get(t.name), last_use.get(t.name) == i) if t.kind == "node" else (None, False) for t in node.inputs),
            )
        )
        for t in node.inputs:
            if last_use.get(t.name) == i:
                lanes.pop(t.name, None)
                sizes.pop(t.name, None)
    return Listing(tuple(lines), n_lanes)


def layer_of(node: Node) -> int | None:
    """The layer that a node's value is named for: 3 for Qcur-3 and cache_k_l3."""
    found = LAYER.search(node.name)
    return int(found[1] or found[2]) if found else None


def _views_of_states(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """Results that are views of a state, or of such views."""
    known: set[str] = set()
    for node in nodes:
        if node.op == "VIEW" and (node.inputs[0].kind == "state" or node.inputs[0].name in known):
            known.add(node.outputs[0].name)
            yield node.outputs[0]


def _cost(node: Node, n_kv: int, views: set[str], read: set[str]) -> dict[str, int]:
    """A node's cost. views: values that lie in states; read: inputs that some node has read already; this node's are added."""
    rule = cost_rule(node)
    nbytes_read = 0
    for t in dict.fromkeys(node.inputs):
        if t.kind == "input" and t.name in read:
            continue
        if t.kind != "node" or t.name in views:
            nbytes_read += rule.read_bytes(node, t, n_kv)
        if t.kind == "input":
            read.add(t.name)
    moved = {"read": nbytes_read, "write": rule.stored_bytes(node, n_kv)}
    return {kind: n for kind, n in {**rule.arithmetic(node, n_kv), **moved}.items() if n}

"""Cutting a graph between two layers: what each part computes, and which values go from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vkback.graph.tensor import Graph, Node, Tensor, live


@dataclass(frozen=True)
class Part:
    """Layers `first` to `end` - 1 of `layers`: with the first layer goes what is before it, with the last one what is behind it."""

    first: int
    end: int
    layers: int

    @property
    def begins(self) -> bool:
        return self.first == 0

    @property
    def ends(self) -> bool:
        return self.end == self.layers

    def given(self, graph: Graph) -> tuple[Tensor, ...]:
        """What this part of a graph of all layers reads of those before it."""
        return () if self.begins else crossing(graph, border(graph, self.first))

    def taken(self, graph: Graph) -> tuple[Tensor, ...]:
        """What later parts read of this one and of those before it."""
        return () if self.ends else crossing(graph, border(graph, self.end))

    def of(self, graph: Graph) -> Graph:
        """This part of a graph of all layers. What it reads of the layers before is input, what later layers read of it is output."""
        begin = 0 if self.begins else border(graph, self.first)
        end = len(graph.nodes) if self.ends else border(graph, self.end)
        inputs = {t.name: replace(t, kind="input") for t in self.given(graph)}

        def read(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(inputs.get(t.name, t) for t in tensors)

        # Of values that cross this part too, on their way to a later one, nothing is made here.
        nodes = [replace(node, inputs=read(node.inputs)) for node in graph.nodes[begin:end]]
        outputs = graph.outputs if self.ends else self.taken(graph)
        return Graph(nodes if self.ends else live(nodes, outputs), outputs)


LAST_NORM = ("RMS_NORM", "MUL", "ADD")
"""What a layer ends with that norms its output before it adds it to its input."""


def border(graph: Graph, layer: int) -> int:
    """The number of the first node that goes with layer `layer`, not with the one before.

    Of one token, a norm at the end of a layer goes with the next one, whose first product makes it on the way: that product has the kernel
    then that it has where nothing is cut, and one kernel and one barrier less stand before the border. Two rows cross in place of one.
    """
    name = f"l_out-{layer - 1}"
    end = next(i for i, node in enumerate(graph.nodes) if any(t.name == name for t in node.outputs)) + 1
    last = graph.nodes[max(end - len(LAST_NORM), 0) : end]
    (out,) = (t for t in last[-1].outputs if t.name == name)
    if out.shape[0] != 1 or tuple(node.op for node in last) != LAST_NORM:
        return end
    chained = all(a.outputs[0].name in [t.name for t in b.inputs] for a, b in pairwise(last))
    return end - len(LAST_NORM) if chained else end


def crossing(graph: Graph, at: int) -> tuple[Tensor, ...]:
    """Values that nodes before `at` make and nodes from there on read."""
    return _made_before(graph.nodes, at, "node")


def _made_before(nodes: Sequence[Node], at: int, kind: str) -> tuple[Tensor, ...]:
    made = {t.name for node in nodes[:at] for t in node.outputs if t.kind == kind}
    read = {t.name: t for node in nodes[at:] for t in node.inputs if t.name in made}
    return tuple(read.values())


def cuttable(graph: Graph, layers: int, rows: int) -> list[int]:
    """Layers with which a part may begin, after the first: no cache or state is needed on both sides, and what crosses has `rows` rows."""
    found = []
    for layer in range(1, layers):
        if not any(t.name == f"l_out-{layer - 1}" for node in graph.nodes for t in node.outputs):
            continue
        at = border(graph, layer)
        if not _made_before(graph.nodes, at, "state") and all(t.shape[0] == rows for t in crossing(graph, at)):
            found.append(layer)
    return found

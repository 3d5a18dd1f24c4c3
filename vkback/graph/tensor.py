"""Tensors, nodes and graphs. One description serves execution, the numpy twin, cost listings and comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeVar

Made = TypeVar("Made")
Kind = Literal["input", "weight", "state", "node", "counter"]


@dataclass(frozen=True)
class Recipe:
    """How a weight is made from tensors of the GGUF file.

    how      "plain": one source; "concat": sources stacked by rows; "interleave": row i of every source in turn
    sources  tensor names in the file, all of one type and with equal columns
    scale    by which the values of a weight of one axis are multiplied
    """

    how: Literal["plain", "concat", "interleave"]
    sources: tuple[str, ...]
    scale: float = 1.0

    @property
    def weights(self) -> dict[str, tuple[str, ...]]:
        """The weights that it combines, with the sources of each: itself, or its parts (`part_name`)."""
        found: dict[str, tuple[str, ...]] = {}
        for source in self.sources:
            weight = source.partition(_PART)[0]
            found[weight] = (*found.get(weight, ()), source)
        return found


_PART = " #"


def part_name(weight: str, number: str) -> str:
    """The name of a part of a weight whose rows do not lie together in the file."""
    return f"{weight}{_PART}{number}"


@dataclass(frozen=True)
class Tensor:
    """A value of the graph.

    type   GGUF type name ("F32", "Q4_K", ...), "I32" for ids, "Q8_1" for quantized activations
    shape  numpy order, last axis contiguous
    kind   "input": written by the host or by the step before; "weight": from the file; "state": lives across tokens
           (KV cache); "node": made by a node; "counter": a kernel's own counters, zero before the first run and put
           back to zero by every run (but for words that tell the host of a fault)
    """

    name: str
    type: str
    shape: tuple[int, ...]
    kind: Kind = "node"
    recipe: Recipe | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.type}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Node:
    """One op: `outputs = op(inputs; params)`. An output that is also an input (a cache) is written in place.

    choice  the kernel that a planner has chosen for it, a value of the op's own; None in a graph. A node made of another with
            `dataclasses.replace` keeps it
    """

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    choice: object = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.outputs[0].name

    def once(self, make: Callable[[Node], Made]) -> Made:
        """What `make` makes of the node, made once and kept with it: passes read a node in its op's own terms time and again."""
        kept: dict[object, Any] = self.__dict__.setdefault("_once", {})
        if make not in kept:
            kept[make] = make(self)
        made: Made = kept[make]
        return made


@dataclass
class Graph:
    """Nodes in an order in which every node follows its sources."""

    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[Tensor, ...] = ()

    def add(self, op: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], **params: Any) -> Node:
        node = Node(op, inputs, outputs, params)
        self.nodes.append(node)
        return node

    def emit(self, op: str, name: str, type: str, shape: tuple[int, ...], inputs: tuple[Tensor, ...], **params: Any) -> Tensor:
        """Add a node with one output and return that output."""
        out = Tensor(name, type, shape)
        self.add(op, inputs, (out,), **params)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, sources first."""
        seen: dict[str, Tensor] = {}
        for node in self.nodes:
            for t in (*node.inputs, *node.outputs):
                seen.setdefault(t.name, t)
        return seen

    def consumers(self, tensor: Tensor) -> Iterator[Node]:
        return (n for n in self.nodes if any(t.name == tensor.name for t in n.inputs))

    def producer(self, tensor: Tensor) -> Node | None:
        return next((n for n in self.nodes if any(t.name == tensor.name for t in n.outputs)), None)


def live(nodes: Sequence[Node], outputs: Iterable[Tensor]) -> list[Node]:
    """Nodes that one of `outputs`, a state (KV cache), or an input (generation loop) or weight (training) written in place depends on, in
    their order."""
    wanted = {t.name for t in outputs}
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(t.name in wanted or t.kind in ("state", "input", "weight") for t in node.outputs):
            kept.append(node)
            wanted |= {t.name for t in node.inputs}
    return kept[::-1]

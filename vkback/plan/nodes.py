"""Lists of nodes: which nodes write and read each tensor, and what a pass rewrites them with.

A pass is a function from nodes to nodes. Tensors are matched by name; a fused node stands where the last node it replaces stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from vkback.graph import Node, Tensor

Nodes = list[Node]


class Index:
    """Producers and consumers of the tensors of a node list, found when they are first asked for: most passes match no node of a graph."""

    def __init__(self, nodes: Sequence[Node], outputs: Iterable[str] = ()) -> None:
        self.outputs = frozenset(outputs)
        self._nodes = nodes

    @cached_property
    def producer(self) -> dict[str, Node]:
        return {t.name: node for node in self._nodes for t in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self._nodes:
            for t in node.inputs:
                if t.name in found:
                    found[t.name].append(node)
                else:
                    found[t.name] = [node]
        return found

    def update(self, nodes: Sequence[Node]) -> None:
        """The list is this one from here on. Who reads a tensor is looked up for what has changed alone: a pass that goes through the
        layers changes a few nodes of each."""
        if nodes is self._nodes:
            return
        before, after = ({id(node): node for node in some} for some in (self._nodes, nodes))
        self._nodes = nodes
        self.__dict__.pop("producer", None)
        if "consumers" not in self.__dict__:
            return
        for node in (node for key, node in before.items() if key not in after):
            for t in node.inputs:
                self.consumers[t.name] = [reader for reader in self.consumers[t.name] if reader is not node]
        for node in (node for key, node in after.items() if key not in before):
            for t in node.inputs:
                self.consumers.setdefault(t.name, []).append(node)

    def read_once(self, tensor: Tensor) -> bool:
        """Whether one node reads a tensor, and it is no output of the graph."""
        return tensor.name not in self.outputs and len(self.consumers.get(tensor.name, [])) == 1

    def one_use_producer(self, tensor: Tensor, op: str) -> Node | None:
        """The producer of a tensor if it is this op and nobody else reads the tensor."""
        node = self.producer.get(tensor.name)
        return node if node is not None and node.op == op and self.read_once(tensor) else None


def replace(nodes: Sequence[Node], old: Iterable[Node], new: Sequence[Node]) -> Nodes:
    """`new` in the place of the last of `old`; the others of `old` vanish."""
    gone = set(map(id, old))
    last = max(i for i, number in enumerate(map(id, nodes)) if number in gone)
    return [*(n for n in nodes[:last] if id(n) not in gone), *new, *nodes[last + 1 :]]


def rewrite(nodes: Nodes, outputs: Iterable[str], match: Callable[[Node, Index], tuple[list[Node], Node] | None]) -> Nodes:
    """Apply `match` (node, index) -> (nodes to replace, replacement) until nothing matches."""
    while True:
        index = Index(nodes, outputs)
        instead: dict[int, list[Node]] = {}  # by the id of a node to replace: what takes its place
        for node in nodes:
            found = match(node, index)
            if found is None or any(id(n) in instead for n in found[0]):
                continue
            old = set(map(id, found[0]))
            last = next(id(n) for n in reversed(nodes) if id(n) in old)
            instead |= {key: [found[1]] if key == last else [] for key in old}
        if not instead:
            return nodes
        nodes = [new for node in nodes for new in instead.get(id(node), (node,))]


def tokens_of(nodes: Sequence[Node]) -> int:
    """How many tokens go through a graph at once."""
    return next((t.shape[0] for node in nodes for t in node.inputs if t.name in ("pos", "tokens")), 1)

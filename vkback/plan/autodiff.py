"""Reverse-mode differentiation of a graph: makes the nodes that compute the gradients, by one rule per op (`Op.backward`).

Nodes are visited last to first. A value that several nodes read has a gradient from each; these are summed in the order in which they are
made, so that reruns give the same bits. Nothing is made that leads to no wanted gradient. The result consists of nodes of the same kind as
the forward pass, which the same planner fuses, groups into stages and lays out in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vkback.graph import Graph, Node, Tensor
from vkback.ops.lowering import PlanError
from vkback.ops.op import cost_rule


def gradient(weight: Tensor) -> Tensor:
    """The tensor that keeps the gradient of a trained weight across programs: F32, row-major."""
    return Tensor(f"grad {weight.name}", "F32", weight.shape, "state")


@dataclass
class Backward:
    """The backward part of a graph.

    nodes    in order
    origins  for each node, the forward node whose rule made it; None: it sums several gradients of one value
    sums     for each value with several gradients, these gradients; by the value's name
    grads    gradient of each wanted weight, by the weight's name
    through  forward nodes that a gradient went through, last first
    """

    nodes: list[Node] = field(default_factory=list)
    origins: list[Node | None] = field(default_factory=list)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    through: list[Node] = field(default_factory=list)


def differentiate(graph: Graph, loss: Tensor, d_loss: Tensor, wanted: Iterable[Tensor], *, accumulate: bool = False) -> Backward:
    """The nodes that compute the gradients of `loss` with respect to each of `wanted`.

    d_loss      F32 [1], factor of the gradients: 1, or 1 / the number of batches whose gradients are accumulated
    wanted      weights; each must be read by some node
    accumulate  add to what `gradient(weight)` holds; else overwrite it
    Raises PlanError naming a node whose op has no rule, or a wanted weight on which the loss does not depend.
    """
    tape = _Tape(graph, {t.name: t for t in wanted}, accumulate)
    tape.receive(loss, d_loss)
    for node in reversed(graph.nodes):
        tape.through(node)
    missing = [name for name in tape.wanted if name not in tape.result.grads]
    if missing:
        raise PlanError(f"[autodiff] {loss.name} does not depend on {', '.join(missing[:3])}: expected weights that some node reads")
    return tape.result


class _Tape:
    """What rules write to (vkback/ops/op.py, Tape)."""

    def __init__(self, graph: Graph, wanted: dict[str, Tensor], accumulate: bool) -> None:
        self.result = Backward()
        self.wanted = wanted
        self._active = set(wanted)
        """Values that depend on a wanted weight."""
        for node in graph.nodes:
            if any(t.name in self._active for t in node.inputs):
                self._active |= {t.name for t in node.outputs}
        self._written: set[str] = set(wanted) if accumulate else set()
        """Wanted weights whose kept gradient has a value already: further gradients are added to it."""
        self._received: dict[str, list[Tensor]] = {}
        self._names: Counter[str] = Counter()
        self._origin: Node | None = None

    def wants(self, tensor: Tensor) -> bool:
        return tensor.name in self._active

    def like(self, tensor: Tensor) -> Tensor:
        if tensor.name in self.wanted and tensor.name not in self._written:
            self._written.add(tensor.name)
            return gradient(tensor)
        name = f"d_{tensor.name}"
        self._names[name] += 1
        return Tensor(name if self._names[name] == 1 else f"{name}.{self._names[name]}", "F32", tensor.shape)

    def kept(self, tensor: Tensor) -> Tensor | None:
        return gradient(tensor) if tensor.name in self._written else None

    def emit(self, op: str, of: Tensor, inputs: tuple[Tensor, ...], **params: Any) -> Tensor:
        out = self.like(of)
        self.add(op, inputs, (out,), **params)
        return out

    def add(self, op: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], **params: Any) -> None:
        self.result.nodes.append(Node(op, inputs, outputs, params))
        self.result.origins.append(self._origin)

    def receive(self, tensor: Tensor, part: Tensor) -> None:
        """Record a gradient of a value; a wanted weight's goes where it is kept."""
        self._received.setdefault(tensor.name, []).append(part)
        if tensor.name in self.wanted:
            self._keep(tensor, part)

    def _keep(self, weight: Tensor, part: Tensor) -> None:
        kept = gradient(weight)
        if part != kept and weight.name in self._written:
            self.add("ADD", (kept, part), (kept,))
        elif part != kept:
            self._written.add(weight.name)
            self.add("SCALE", (part,), (kept,), scale=1.0, bias=0.0)
        self.result.grads[weight.name] = kept

    def _summed(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a value, once all nodes that read it have been visited."""
        parts = self._received.get(tensor.name, [])
        if len(parts) > 1:
            self.result.sums[tensor.name] = list(parts)
        self._origin = None
        while len(parts) > 1:
            first, second, *rest = parts
            parts = [self.emit("ADD", tensor, (first, second)), *rest]
        return parts[0] if parts else None

    def through(self, node: Node) -> None:
        """The gradients of a node's operands."""
        if not any(map(self.wants, node.inputs)):
            return
        dy = self._summed(node.outputs[0])
        if dy is None:
            return
        self._origin = node
        self.result.through.append(node)
        for x, dx in zip(node.inputs, cost_rule(node).backward(node, dy, self), strict=True):
            if dx is not None and self.wants(x):
                self.receive(x, dx)


__all__ = ["Backward", "differentiate", "gradient"]

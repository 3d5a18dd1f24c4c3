"""Ops that make the gradient of another op: what each says of the scalar that it differentiates (docs/training_ops.md)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node
from vkback.ops.case import Array
from vkback.ops.cost import Cost, times
from vkback.ops.op import Op


@dataclass(frozen=True)
class Scalar:
    """A function of some variables, and the values at which it was differentiated; all float64."""

    at: tuple[Array, ...]
    value: Callable[..., float]


class Gradient(Op):
    """An op whose outputs are the gradient of a scalar, usually of sum(dy * y) of the op that it belongs to.

    cost  operations for each value of its largest operand, by kind
    """

    cost: ClassVar[Cost] = {"fmul": 2, "fadd": 1}

    @abstractmethod
    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        """The scalar whose derivatives by its variables are this op's outputs, one by one; inputs as `reference` takes them."""

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return times(self.cost, max(t.elements for t in (*node.inputs, *node.outputs)))


def against(dy: Array, forward: Callable[..., Array], *at: Array) -> Scalar:
    """sum(dy * forward(variables))"""
    weights = np.asarray(dy, np.float64)
    return Scalar(tuple(np.array(a, np.float64) for a in at), lambda *x: float(np.sum(weights * forward(*x).reshape(weights.shape))))

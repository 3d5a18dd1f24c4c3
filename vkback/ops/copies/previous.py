"""PREVIOUS (shaders/copy/previous.comp): pos I32 [n] -> I32 [n], the position before each; -1 before the first, and of padding (-1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext
from vkback.ops.op import Op, moves_values, register


@register
class Previous(Op):
    """See the module's text."""

    name = "PREVIOUS"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.maximum(inputs[0], 0) - 1]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        pos, previous = node.inputs[0], node.outputs[0]
        args = Arg(pos), Arg(previous, "w")
        return [by_threads(node, ctx, "copy/previous.comp", args, (pos.elements,), pos.elements, spins_on=())]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "whole numbers")

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1, 0)
        yield self.build_case(5, 0, 2)
        yield self.build_case(300, 77, 9)

    def full_cases(self) -> Iterator[Case]:
        for n in (1, 64, 513):
            yield self.build_case(n, 0, n // 4)
            yield self.build_case(n, 4000)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(512, 0)

    def build_case(self, n: int, first: int, padding: int = 0, seed: int = 1) -> Case:
        """n positions from the first on, the last of which are padding."""

        def make(rng: np.random.Generator) -> Problem:
            pos = np.arange(first, first + n, dtype=np.int32)
            pos[n - padding :] = -1
            return Problem(Node(self.name, (Tensor("pos", "I32", (n,), "input"),), (Tensor("y", "I32", (n,)),)), {"pos": pos})

        return Case(self.name, {"n": n, "first": first, "padding": padding, "seed": seed}, make, seed)

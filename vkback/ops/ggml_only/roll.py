"""ROLL (shaders/roll): values moved along axes, those that leave at one end coming in at the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import is_general, lower_general, permuted
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.view import View

SHAPE = (3, 4, 5, 10)
"""Of lines of test-backend-ops, which do not say."""
PERMUTED = (0, 2, 1, 3)
"""Where ggml's axes of a permuted x go."""


@register
class Roll(Op):
    """ROLL(x F32 [n3, n2, n1, n0]; shifts, four, of the fastest axis first) -> F32 as x: x[i] at i + shift, modulo the size."""

    name = "ROLL"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.roll(np.asarray(inputs[0], np.float64), params["shifts"], (3, 2, 1, 0))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        if len(x.shape) != 4 or y.shape != x.shape:
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected four axes on either side")
        shifts = (s % n for s, n in zip(node.params["shifts"][::-1], x.shape, strict=True))
        return [by_threads(node, ctx, "roll/roll.comp", (Arg(x), Arg(y, "w")), (*x.shape, *shifts), x.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "values are moved, not computed")

    def build_case(
        self, shift0: int = 3, shift1: int = -2, shift3: int = 1, shift4: int = -1, permute: bool = False, seed: int = 59
    ) -> Case:
        """Shifts of axes 0 to 3, called so; of a tensor of 10 x 5 x 4 x 3 values, or of one permuted."""
        view = permuted(SHAPE, PERMUTED) if permute else View.whole(SHAPE)
        shifts = (shift0, shift1, shift3, shift4)

        def make(rng: np.random.Generator) -> Problem:
            params = {"shifts": shifts} | ({"views": {0: view}} if permute else {})
            node = Node(self.name, (Tensor("x", "F32", SHAPE, "input"),), (Tensor("y", "F32", view.shape),), params)
            return Problem(node, {"x": rng.uniform(-1, 1, SHAPE).astype(np.float32)})

        names = ("shift0", "shift1", "shift3", "shift4")
        shown = {**dict(zip(names, shifts, strict=True)), "permute": int(permute), "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case(-13, 0, 2, 100, permute=True)

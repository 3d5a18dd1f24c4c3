"""REPEAT_BACK (shaders/copy/repeat_back.comp): sums of what was repeated; of rows by shaders/sums/columns.comp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import is_general, lower_general
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import register
from vkback.ops.training.column_sums import column_sums
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.view import View

MAX_TIMES = 32768
"""Repetitions of a value that a thread adds up, as CPU drivers end longer loops; beyond, one axis goes after the other."""


def axes_of(shape: Shape) -> Shape:
    """Four axes, those in front of length 1."""
    return (1,) * (4 - len(shape)) + tuple(shape)


@register
class RepeatBack(Gradient):
    """REPEAT_BACK(dy; shape) -> dx of that shape, whose sizes divide those of dy axis by axis."""

    name = "REPEAT_BACK"
    cost: ClassVar[Cost] = {"fadd": 1}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, shape = np.asarray(inputs[0], np.float64), axes_of(params["shape"])
        parts = [n for big, small in zip(axes_of(dy.shape), shape, strict=True) for n in (big // small, small)]
        return [dy.reshape(parts).sum(axis=(0, 2, 4, 6)).reshape(params["shape"])]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        dy, shape = np.asarray(inputs[0], np.float64), axes_of(params["shape"])
        times = [big // small for big, small in zip(axes_of(dy.shape), shape, strict=True)]
        return against(dy, lambda x: np.tile(x.reshape(shape), times), np.zeros(params["shape"]))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        dy, dx = node.inputs[0], node.outputs[0]
        big, small = axes_of(dy.shape), axes_of(dx.shape)
        if tuple(node.params["shape"]) != dx.shape or any(b % s for b, s in zip(big, small, strict=True)):
            raise PlanError(f"[{self.name}] {node.name}: {dy} to {dx}: expected sizes that divide those of dy, and the param shape as dx")
        first = next((axis for axis in range(4) if small[axis] != 1), 4)
        if big[first:] == small[first:]:  # whole tensors add up, as the rows of a matrix do
            return column_sums(node, ctx, dy, dx, prod(big[:first]), dx.elements)
        times = [b // s for b, s in zip(big, small, strict=True)]
        if prod(times) > MAX_TIMES and sum(t > 1 for t in times) > 1:
            axis = max(axis for axis in range(4) if times[axis] > 1)
            between = Tensor(f"{dx.name}.axis{axis}", "F32", tuple(small[i] if i == axis else big[i] for i in range(4)))
            last = Node(node.op, (between,), (dx,), node.params)
            return [*self.lower(Node(node.op, (dy,), (between,), {"shape": between.shape}), ctx), *self.lower(last, ctx)]
        push = (dx.elements, *small[::-1], *times[::-1])
        return [by_threads(node, ctx, "copy/repeat_back.comp", (Arg(dy), Arg(dx, "w")), push, dx.elements, flops=dy.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums, relative error about 2^-24 times the square root of their number")

    def build_case(
        self, type: str = "f32", ne: Shape = (8, 6, 4, 2), nr: tuple[int, int, int, int] = (2, 2, 2, 2), v: bool = False, seed: int = 31
    ) -> Case:
        """ne: of dx; nr: repetitions; v: dy is the first half of its tensor along every axis that is repeated."""
        one_of_types(type, ("F32",))
        small = shape_of(ne)
        if min(nr) < 1 or (v and any(n % 2 and n > 1 for n in nr)):
            raise CaseLineError(f"{self.name}: nr={list(nr)}, v={int(v)}: expected numbers above 0, with v=1 even where they are not 1")
        inner = sized(tuple(n * times for n, times in zip(small, nr[::-1], strict=True)))
        shape = tuple(n if times == 1 or not v else n // 2 for n, times in zip(inner, nr[::-1], strict=True))
        view = View(0, shape, View.whole(inner).strides)

        def make(rng: np.random.Generator) -> Problem:
            dy = Tensor("dy", "F32", inner, "input")
            params: dict[str, Any] = {"shape": small} | ({"views": {0: view}} if shape != inner else {})
            node = Node(self.name, (dy,), (Tensor("dx", "F32", small),), params)
            return Problem(node, {"dy": rng.uniform(-0.5, 1.5, inner).astype(np.float32)})

        return Case(self.name, {"type": "f32", "ne": ne_of(small), "nr": nr, "v": int(v), "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(7, 5, 2, 3), nr=(2, 3, 1, 2))
        yield self.build_case(ne=(8, 6, 4, 2), nr=(2, 1, 4, 1), v=True)
        yield self.build_case(ne=(70, 1, 1, 1), nr=(1, 45, 1, 1))

    def full_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(576, 1, 1, 1), nr=(1, 2000, 1, 1))
        yield self.build_case(ne=(1, 1, 1, 1), nr=(100, 10, 3, 2))
        yield self.build_case(ne=(2, 3, 1, 1), nr=(300, 250, 1, 1))

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(4096, 1, 1, 1), nr=(1, 512, 1, 1))

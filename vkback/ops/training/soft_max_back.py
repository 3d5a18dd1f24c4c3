"""SOFT_MAX_BACK (shaders/soft_max/back.comp): a workgroup a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import register
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.workgroup import workgroup_size


def soft_max(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


@register
class SoftMaxBack(Gradient):
    """SOFT_MAX_BACK(dy, y; scale) -> dx [..., dim], which may be dy or y; y = softmax(scale * x [+ mask]) over the last axis."""

    name = "SOFT_MAX_BACK"
    ggml_nmse = 1e-6
    cost: ClassVar[Cost] = {"fmul": 3, "fadd": 2}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, y = (np.asarray(i, np.float64) for i in inputs)
        return [params.get("scale", 1.0) * y * (dy - np.sum(dy * y, axis=-1, keepdims=True))]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        """At the x whose softmax y is."""
        scale = params.get("scale", 1.0)
        return against(inputs[0], lambda x: soft_max(scale * x), np.log(np.asarray(inputs[1], np.float64)) / scale)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, y = node.inputs
        dx = node.outputs[0]
        if not dy.elements == y.elements == dx.elements:
            raise PlanError(f"[{self.name}] {node.name}: {dy}, {y} to {dx}: expected as many values in each")
        dim, rows = y.shape[-1], prod(y.shape[:-1])
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], ceil_div(dim, 4))
        args = (Arg(dy), Arg(y), Arg(dx, "w"))
        push = (rows, dim, float(node.params.get("scale", 1.0)))
        return [by_rows(node, ctx, "soft_max/back.comp", args, push, rows, wg, choice, flops=5 * y.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-4, "f32 sums of a row's products, and differences of terms as large as dy")

    def build_case(
        self, type: str = "f32", ne: Shape = (10, 5, 4, 3), scale: float = 1.0, max_bias: float = 0.0, inplace: bool = False, seed: int = 37
    ) -> Case:
        """max_bias weighs a mask, which is no variable: it changes nothing here. inplace: dx replaces dy."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if scale == 0 or max_bias < 0:
            raise CaseLineError(f"{self.name}: scale={scale}, max_bias={max_bias}: expected a scale other than 0, and a bias from 0")

        def make(rng: np.random.Generator) -> Problem:
            dy, y = (Tensor(name, "F32", shape, "input") for name in ("dy", "y"))
            values = {"dy": rng.uniform(-1, 1, shape).astype(np.float32), "y": soft_max(rng.uniform(-4, 4, shape)).astype(np.float32)}
            return Problem(Node(self.name, (dy, y), (dy if inplace else Tensor("dx", "F32", shape),), {"scale": scale}), values)

        shown = {"type": "f32", "ne": ne_of(shape), "scale": scale, "max_bias": max_bias, "inplace": int(inplace), "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 2, 1), scale=0.1)
        yield self.build_case(ne=(1000, 2, 1, 1), inplace=True)

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in ((2, 3), (511, 5), (4096, 7), (49152, 2)):
            yield self.build_case(ne=(dim, rows, 1, 1), scale=0.5)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(512, 512, 9, 1))

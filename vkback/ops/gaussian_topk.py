"""GAUSSIAN_TOPK (shaders/norm): activation sparsity by a cutoff that the mean and the standard deviation of a row give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import sized
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.workgroup import workgroup_size


@register
class GaussianTopk(Op):
    """GAUSSIAN_TOPK(x F32 [..., dim]; scale) -> max(x - mean - scale * standard deviation, 0) of each row."""

    name = "GAUSSIAN_TOPK"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Two sums over the row, and the difference."""
        x = node.inputs[0]
        return {"fadd": 4 * x.elements, "fmul": x.elements, "sqrt": x.elements // x.shape[-1]}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        cutoff = x.mean(axis=-1, keepdims=True) + params["scale"] * x.std(axis=-1, keepdims=True)
        return [np.maximum(x - cutoff, 0.0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if (x.type, y.type, x.shape) != ("F32", "F32", y.shape):
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected F32 of one shape")
        dim = x.shape[-1]
        rows = x.elements // dim
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], dim)
        push = (rows, dim, float(node.params["scale"]))
        return [by_rows(node, ctx, "norm/gaussian_topk.comp", (Arg(x), Arg(y, "w")), push, rows, wg, choice, flops=6 * x.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-4, "f32 sums of a row; few values are left, so that the rms is small beside those that were summed")

    def build_case(self, ne: Shape = (3, 100), scale: float = 1.0, seed: int = 5) -> Case:
        """Normal values about 0.5."""
        sized(ne)

        def make(rng: np.random.Generator) -> Problem:
            node = Node(self.name, (Tensor("x", "F32", ne, "input"),), (Tensor("y", "F32", ne),), {"scale": scale})
            return Problem(node, {"x": (rng.standard_normal(ne) + 0.5).astype(np.float32)})

        return Case(self.name, {"ne": ne, "scale": scale, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case((2, 16384), 1.6448533535003662)
        yield self.build_case((1, 1030), -0.5)

    def full_cases(self) -> Iterator[Case]:
        for rows, dim, scale in product((1, 33), (2, 64, 1025, 8192), (-1.0, 0.0, 1.5)):
            yield self.build_case((rows, dim), scale)

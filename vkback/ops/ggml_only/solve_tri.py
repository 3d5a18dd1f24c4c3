"""SOLVE_TRI (shaders/solve): X of L X = B for a lower triangular matrix L."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register


@register
class SolveTri(Op):
    """SOLVE_TRI(l F32 [.., n, n] lower triangular, b F32 [.., n, columns]) -> x F32 as b with l x = b. What is above the diagonal is not
    read."""

    name = "SOLVE_TRI"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.linalg.solve(np.tril(np.asarray(inputs[0], np.float64)), np.asarray(inputs[1], np.float64))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        left, b = node.inputs
        x, n, columns = node.outputs[0], b.shape[-2], b.shape[-1]
        if left.shape != (*b.shape[:-2], n, n) or x.shape != b.shape:
            raise PlanError(f"[{self.name}] {node.name}: {left} and {b} to {x}: they do not fit")
        threads = prod(b.shape[:-2]) * columns
        args = (Arg(left), Arg(b), Arg(x, "rw"))
        return [by_threads(node, ctx, "solve/tri.comp", args, (threads, n, columns), threads, flops=threads * n * n)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-4, "f32 substitution with a dominant diagonal: errors stay those of sums of n products")

    def build_case(self, type: str = "f32", ne_lhs: Shape = (10, 10, 4, 3), ne_rhs: Shape = (3, 10, 4, 3), seed: int = 5) -> Case:
        """The diagonal is 1 to 2, beside it is at most 1 / n; above it is NaN."""
        one_of_types(type, ("F32",))
        left, right = shape_of(ne_lhs, "ne_lhs"), shape_of(ne_rhs, "ne_rhs")
        if left[2] != left[3] or left[:2] != right[:2] or left[3] != right[2]:
            raise CaseLineError(f"ne_lhs={list(ne_lhs)}, ne_rhs={list(ne_rhs)}: expected n x n and n rows, in as many batches")

        def make(rng: np.random.Generator) -> Problem:
            n = left[3]
            matrix = np.tril(rng.uniform(-1, 1, left) / n, -1) + np.eye(n) * rng.uniform(1, 2, (*left[:3], 1))
            matrix[..., np.triu(np.ones((n, n), bool), 1)] = np.nan
            node = Node(self.name, (Tensor("l", "F32", left, "input"), Tensor("b", "F32", right, "input")), (Tensor("x", "F32", right),))
            return Problem(node, {"l": matrix.astype(np.float32), "b": rng.uniform(-1, 1, right).astype(np.float32)})

        return Case(self.name, {"type": "f32", "ne_lhs": ne_of(left), "ne_rhs": ne_of(right), "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case(ne_lhs=(33, 33, 2, 1), ne_rhs=(5, 33, 2, 1))

"""SUM_SQUARES and CLIP_SCALE (shaders/training): the norm of all gradients together, and the factor that clips them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.ggml_words import sized
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import in_planes, nbytes
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

BLOCK = 16384
"""Values that a workgroup squares, unless there would be more than MAX_PARTS of them."""

MAX_PARTS = 256
"""Workgroups of one tensor."""


@register
class SumSquares(Op):
    """SUM_SQUARES(any number of F32 tensors) -> F32 [1]: of all their values."""

    name = "SUM_SQUARES"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        count = sum(t.elements for t in node.inputs)
        return {"fmul": count, "fadd": count}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.array([sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in inputs)])]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        for t in node.inputs:
            if t.type != "F32" or in_planes(t):
                raise PlanError(f"[{self.name}] {node.name}: {t}: expected F32 values one after the other")
        blocks = [max(BLOCK, ceil_div(t.elements, MAX_PARTS)) for t in node.inputs]
        counts = [ceil_div(t.elements, block) for t, block in zip(node.inputs, blocks, strict=True)]
        parts = Tensor(f"{node.name}.parts", "F32", (sum(counts),))
        wg = workgroup_size(ctx.caps, ctx.tuning.pick("norm", dim=BLOCK, rows=sum(counts))["wg_size"], BLOCK)
        dispatches, first = [], 0
        for i, (t, block, count) in enumerate(zip(node.inputs, blocks, counts, strict=True)):
            part = Arg(parts, "w", part=f"of {i}")
            dispatches.append(self._launch(node, ctx, Arg(t), part, (t.elements, block, first), count, wg, last=0))
            first += count
        whole = Arg(node.outputs[0], "w")
        return [*dispatches, self._launch(node, ctx, Arg(parts), whole, (parts.elements, parts.elements, 0), 1, wg, last=1)]

    def _launch(
        self, node: Node, ctx: LowerContext, x: Arg, y: Arg, push: tuple[int, int, int], groups: int, wg: int, last: int
    ) -> Dispatch:
        defines, subgroup = reduction(ctx.caps, wg)
        return Dispatch(
            Variant.of("training/sum_squares.comp", {**defines, "LAST": last}, subgroup_size=subgroup),
            (x, y),
            pack_push(*push),
            (groups, 1, 1),
            node.op,
            node.name,
            f"{wg} threads",
            nbytes=nbytes(x.tensor),
            flops=2 * push[0],
        )

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-5, "f32 sums of squares, which do not cancel: 2^-24 times the square root of a thread's share")

    def build_case(self, sizes: Shape, seed: int = 47) -> Case:
        """Tensors of so many values each, in +-1."""
        if not sizes or min(sizes) < 1 or len(sizes) > 1000:
            raise CaseLineError(f"{self.name}: sizes={list(sizes)}: expected one to 1000 numbers above 0")
        for n in sizes:
            sized((n,))

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(f"x{i}", "F32", (n,), "input") for i, n in enumerate(sizes))
            values = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in inputs}
            return Problem(Node(self.name, inputs, (Tensor("sum", "F32", (1,)),)), values)

        return Case(self.name, {"sizes": sizes, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case((1, 37, 40000))

    def full_cases(self) -> Iterator[Case]:
        yield self.build_case((5_000_000,))
        yield self.build_case((3,) * 300)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case((28_311_552, 884_736, 884_736, 884_736))


@register
class ClipScale(Op):
    """CLIP_SCALE(sum of squares F32 [1]; max_norm) -> scale F32 [1], norm F32 [1]."""

    name = "CLIP_SCALE"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"sqrt": 1, "fadd": 1, "fdiv": 1}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        norm = np.sqrt(np.asarray(inputs[0], np.float64))
        return [np.minimum(1.0, params["max_norm"] / (norm + 1e-6)), norm]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if any(t.elements != 1 for t in (*node.inputs, *node.outputs)):
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, (*node.inputs, *node.outputs)))}: expected one value each")
        args = (Arg(node.inputs[0]), *(Arg(t, "w") for t in node.outputs))
        push = pack_push(float(node.params["max_norm"]))
        kernel = Variant.of("training/clip_scale.comp")
        return [Dispatch(kernel, args, push, (1, 1, 1), node.op, node.name, "one thread", nbytes=12, flops=3)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-6, "a square root and a division in f32, 2.5 ulp each")

    def build_case(self, sum: float = 7.5, max_norm: float = 1.0, seed: int = 53) -> Case:
        if sum < 0 or max_norm <= 0:
            raise CaseLineError(f"{self.name}: sum={sum}, max_norm={max_norm}: expected a sum from 0, and a norm above 0")

        def make(rng: np.random.Generator) -> Problem:
            outputs = tuple(Tensor(name, "F32", (1,)) for name in ("scale", "norm"))
            node = Node(self.name, (Tensor("sum", "F32", (1,), "input"),), outputs, {"max_norm": max_norm})
            return Problem(node, {"sum": np.array([sum], np.float32)})

        return Case(self.name, {"sum": sum, "max_norm": max_norm, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case(0.25)

"""SUM, MEAN, CUMSUM and COUNT_EQUAL (shaders/sums)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.copies.copy_cases import NONE, view_of
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import is_general, lower_general, view_in
from vkback.ops.ggml_words import Four, ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.view import View
from vkback.ops.workgroup import workgroup_size

LONGEST = 1 << 16
"""Values that one workgroup adds up: beyond, a sum goes in two steps."""


def rows_launch(
    node: Node, ctx: LowerContext, function: int, x: Tensor, y: Tensor, shape: tuple[int, int], factor: float, *more: Tensor
) -> Dispatch:
    """One launch of shaders/sums/sums.comp over [rows, k]."""
    rows, k = shape
    choice = ctx.tuning.pick("elementwise", elements=k)
    wg = workgroup_size(ctx.caps, max(choice["wg_size"], 64), k)
    args = (Arg(x), Arg(y, "w"), *map(Arg, more))
    push, moved = (rows, k, float(factor)), nbytes(x) + nbytes(y)
    defines = {"FUNCTION": function}
    return by_rows(node, ctx, "sums/sums.comp", args, push, rows, wg, choice, defines, how=" a row", moved=moved, flops=rows * k)


class Sums(Op):
    """An op of sums along the last axis. x F32, or a view of it (`views`)."""

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        raise NotImplementedError

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        # Sums of n uniform values are as large as the square root of n, their f32 sums off by 2^-24 of what was added so far.
        return Tolerance(1e-10, 1e-4, "f32 sums of values that partly cancel")

    def case_of(self, shown: Mapping[str, Any], inner: Shape, view: View | None, out: Shape, seed: int) -> Case:
        """The case of x in +-1, a view of a tensor `inner`."""

        def make(rng: np.random.Generator) -> Problem:
            params = {"views": {0: view}} if view else {}
            node = Node(self.name, (Tensor("x", "F32", inner, "input"),), (Tensor("y", "F32", out),), params)
            return Problem(node, {"x": rng.uniform(-1, 1, inner).astype(np.float32)})

        return Case(self.name, {**shown, "seed": seed}, make, seed)


@register
class Mean(Sums):
    """MEAN(x F32 [..., k]) -> F32 [..., 1], the mean of each row."""

    name = "MEAN"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """A sum over each row, and a product."""
        return {"fadd": node.inputs[0].elements, "fmul": node.outputs[0].elements}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.mean(np.asarray(inputs[0], np.float64), axis=-1, keepdims=True)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        k = x.shape[-1]
        return [rows_launch(node, ctx, 0, x, y, (x.elements // k, k), 1 / k)]

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), permute: bool = False, slice: bool = False, seed: int = 3) -> Case:
        """permute: of a tensor whose axes 1 to 3 are exchanged; slice: of every second value along them."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        view: View | None = None
        inner = shape
        if slice:
            inner, view = view_in(shape, (1, 2, 2, 1))
            view = View(0, shape, (view.strides[0], 2 * view.strides[1], 2 * view.strides[2], 1))
        if permute:
            view = view or View.whole(inner)
            view = View(0, tuple(view.shape[i] for i in (1, 0, 2, 3)), tuple(view.strides[i] for i in (1, 0, 2, 3)))
        sized(inner)
        out = (*(view.shape if view else shape)[:3], 1)
        shown = {"type": type_word("F32"), "ne": ne_of(shape), "permute": int(permute), "slice": int(slice)}
        return self.case_of(shown, inner, view, out, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case(ne=(33, 5, 2, 3), permute=True, slice=True)


@register
class Sum(Sums):
    """SUM(x F32) -> F32 [1], the sum of all values."""

    name = "SUM"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.sum(np.asarray(inputs[0], np.float64)).reshape(1)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        k = x.shape[-1]
        if x.elements <= LONGEST:
            return [rows_launch(node, ctx, 0, x, y, (1, x.elements), 1.0)]
        partial = Tensor(f"{node.name}.rows", "F32", (x.elements // k,))
        return [
            rows_launch(node, ctx, 0, x, partial, (partial.elements, k), 1.0),
            rows_launch(node, ctx, 0, partial, y, (1, partial.elements), 1.0),
        ]

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), permute: Four = NONE, seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        view = view_of(shape, permute, "permute") if permute != NONE else None
        shown = {"type": type_word("F32"), "ne": ne_of(shape)} | ({"permute": permute} if view else {})
        return self.case_of(shown, shape, view, (1,), seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case(ne=(11, 5, 6, 3), permute=(0, 3, 2, 1))
        yield self.build_case(ne=(1024, 100, 1, 1))


@register
class Cumsum(Sums):
    """CUMSUM(x F32 [..., k]) -> F32 as x: of each value the sum with those before it in its row."""

    name = "CUMSUM"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.cumsum(np.asarray(inputs[0], np.float64), axis=-1)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        k = x.shape[-1]
        return [rows_launch(node, ctx, 1, x, y, (x.elements // k, k), 1.0)]

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        return self.case_of({"type": "f32", "ne": ne_of(shape)}, shape, None, shape, seed)

    def cases(self) -> Iterator[Case]:
        for ne in ((10, 5, 4, 3), (1023, 2, 3, 1), (1, 3, 1, 1)):
            yield self.build_case(ne=ne)


@register
class CountEqual(Op):
    """COUNT_EQUAL(a I32, b I32) -> I64 [1], the number of places with equal values."""

    name = "COUNT_EQUAL"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.array([np.count_nonzero(inputs[0] == inputs[1])], np.int64)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, b = node.inputs
        if (a.type, b.type, node.outputs[0].type) != ("I32", "I32", "I64") or a.elements != b.elements:
            raise PlanError(f"[{self.name}] {node.name}: {a} and {b}: expected I32 of one size, and I64")
        return [rows_launch(node, ctx, 2, b, node.outputs[0], (1, a.elements), 1.0, a)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "a count")

    def build_case(self, type: str = "f32", ne: Shape = (4, 500, 1, 1), seed: int = 3) -> Case:
        """Of the places of the largest of each row of two tensors of this type and size, as ARGMAX gives them."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(name, "I32", (prod(shape[:3]),), "input") for name in "ab")
            node = Node(self.name, inputs, (Tensor("y", "I64", (1,)),))
            return Problem(node, {t.name: rng.integers(0, shape[3], t.shape).astype(np.int32) for t in inputs})

        return Case(self.name, {"type": "f32", "ne": ne_of(shape), "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()

"""ARGSORT and TOP_K (shaders/argsort): every value counts its rank, so that time grows with the square of a row; long rows are
merge-sorted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.storage import nbytes


def _ranked(node: Node, ctx: LowerContext, *, descending: bool) -> list[Dispatch]:
    """The launch that writes the first indices of each row's order, as many as the output has columns."""
    x, y = node.inputs[0], node.outputs[0]
    dim, rows = x.shape[-1], prod(x.shape[:-1])
    if dim > LONGEST_COUNTED:
        return _merged(node, ctx, descending=descending)
    choice = ctx.tuning.pick("elementwise", elements=x.elements)
    gz = ceil_div(rows, MAX_GROUPS_X)
    return [
        by_threads(
            node,
            ctx,
            "argsort/argsort.comp",
            (Arg(x), Arg(y, "w")),
            (rows, dim, y.shape[-1]),
            dim,
            {"DESCENDING": int(descending)},
            choice=choice,
            grid=(ceil_div(rows, gz), gz),
        )
    ]


def _merged(node: Node, ctx: LowerContext, *, descending: bool) -> list[Dispatch]:
    """The launches of a merge sort: runs of 1, 2, 4... indices, until one takes the whole row; the last writes as many as are wanted."""
    x, y = node.inputs[0], node.outputs[0]
    dim, rows = x.shape[-1], prod(x.shape[:-1])
    choice = ctx.tuning.pick("elementwise", elements=x.elements)
    gz = ceil_div(rows, MAX_GROUPS_X)
    passes = (dim - 1).bit_length()
    between = [Tensor(f"{node.name}.order{i}", "I32", x.shape) for i in range(2)]
    dispatches = []
    for i in range(passes):
        source, target = x if i == 0 else between[i % 2], y if i == passes - 1 else between[(i + 1) % 2]
        defines = {"DESCENDING": int(descending), "FIRST": int(i == 0)}
        dispatches.append(
            by_threads(
                node,
                ctx,
                "argsort/merge.comp",
                (Arg(x), Arg(source), Arg(target, "w")),
                (rows, dim, 1 << i, target.shape[-1]),
                dim,
                defines,
                choice=choice,
                grid=(ceil_div(rows, gz), gz),
                moved=nbytes(x) + nbytes(target),
            )
        )
    return dispatches


def _order(x: Array, *, descending: bool) -> Array:
    values = np.asarray(x, np.float64)
    return np.argsort(-values if descending else values, axis=-1, kind="stable").astype(np.int32)


def _coarse(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of a coarse grid, so that many are equal."""
    return (rng.integers(-20, 20, shape) / 4).astype(np.float32)


LONGEST_COUNTED = 4096
"""Values of a row whose ranks are counted: up to here less than the launches of a merge sort cost."""

EXACT = Tolerance(0.0, 0.0, "comparisons are exact")

SHAPES: tuple[Shape, ...] = ((1,), (2,), (1, 7), (16, 10, 10), (60, 10, 10), (1, 512), (1, 1025), (3, 2047), (2, 8192))
"""Of the full set."""


@register
class ArgSort(Op):
    """ARGSORT(x F32 [..., dim]; order "asc" | "desc") -> I32 [..., dim]; of equal values the lower index comes first."""

    name = "ARGSORT"
    arithmetic = moves_values
    ggml_nmse = 0.0

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [_order(inputs[0], descending=params["order"] == "desc")]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y, order = node.inputs[0], node.outputs[0], node.params["order"]
        if order not in ("asc", "desc") or y.type != "I32" or y.shape != x.shape:
            raise PlanError(f"[ARGSORT] {node.name}: {x} to {y}, order {order!r}: expected I32 of its shape, order 'asc' or 'desc'")
        return _ranked(node, ctx, descending=order == "desc")

    def cases(self) -> Iterator[Case]:
        for order in (0, 1):
            for shape in ((2, 16), (3, 2, 60), (1, 1023), (4, 1)):
                yield self.build_case(ne=ne_of(shape), order=order)
        yield self.build_case(ne=(5001, 2), order=0)

    def full_cases(self) -> Iterator[Case]:
        for order, shape in product((0, 1), (*SHAPES, (3, 4097), (1, 20000))):
            yield self.build_case(ne=ne_of(shape), order=order)

    def build_case(self, type: str = "f32", ne: Shape = (16, 10, 10, 10), order: int = 0, seed: int = 43) -> Case:
        """order: 0 ascending, 1 descending. Many values are equal."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if order not in (0, 1):
            raise CaseLineError(f"ARGSORT: order={order}: expected 0 (ascending) or 1 (descending)")

        def make(rng: np.random.Generator) -> Problem:
            params = {"order": ("asc", "desc")[order]}
            node = Node("ARGSORT", (Tensor("x", "F32", shape, "input"),), (Tensor("y", "I32", shape),), params)
            return Problem(node, {"x": _coarse(shape, rng)})

        return Case("ARGSORT", {"type": type.lower(), "ne": ne_of(shape), "order": order, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT


@register
class TopK(Op):
    """TOP_K(x F32 [..., dim]) -> I32 [..., k]: indices of the k largest of each row, the largest first, of equal ones the lower index."""

    name = "TOP_K"
    arithmetic = moves_values
    ggml_nmse = 0.0

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [_order(inputs[0], descending=True)[..., : params["k"]]]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y, k = node.inputs[0], node.outputs[0], node.params["k"]
        if not 1 <= k <= x.shape[-1] or y.type != "I32" or y.shape != (*x.shape[:-1], k):
            raise PlanError(f"[TOP_K] {node.name}: k = {k} of {x} to {y}: expected 1 to {x.shape[-1]}, I32 with k columns")
        return _ranked(node, ctx, descending=True)

    def cases(self) -> Iterator[Case]:
        for shape, k in (((2, 16), 1), ((3, 2, 60), 7), ((1, 1023), 40), ((4, 5), 5)):
            yield self.build_case(ne=ne_of(shape), k=k, ties=True)
        yield self.build_case(ne=(5001, 2), k=40)

    def full_cases(self) -> Iterator[Case]:
        for shape in (*SHAPES, (3, 4097), (1, 20000)):
            for k in sorted({1, 2, 40, shape[-1] // 2, shape[-1] - 1, shape[-1]}):
                if 1 <= k <= shape[-1]:
                    yield self.build_case(ne=ne_of(shape), k=k, ties=True)

    def build_case(self, type: str = "f32", ne: Shape = (16, 10, 10, 10), k: int = 4, ties: bool = False, seed: int = 47) -> Case:
        """ties: many values are equal; else none are."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if not 1 <= k <= shape[-1]:
            raise CaseLineError(f"TOP_K: k={k}: expected 1 to {shape[-1]}, the first of ne")

        def make(rng: np.random.Generator) -> Problem:
            y = Tensor("y", "I32", (*shape[:-1], k))
            values = _coarse(shape, rng) if ties else rng.permutation(prod(shape)).reshape(shape).astype(np.float32) - 10
            return Problem(Node("TOP_K", (Tensor("x", "F32", shape, "input"),), (y,), {"k": k}), {"x": values})

        return Case("TOP_K", {"type": type.lower(), "ne": ne_of(shape), "k": k, "ties": int(ties), "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT

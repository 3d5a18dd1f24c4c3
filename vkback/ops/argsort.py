"""ARGSORT and TOP_K (shaders/argsort): every value counts its rank, so time grows with the square of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.base import (
    MAX_GROUPS_X,
    Arg,
    Array,
    Case,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Shape,
    Tolerance,
    ceil_div,
    moves_values,
    nbytes,
    pack_push,
    register,
)
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant


def _ranked(node: Node, ctx: LowerContext, *, descending: bool) -> list[Dispatch]:
    """The launch that writes the first indices of each row's order, as many as the output has columns."""
    x, y = node.inputs[0], node.outputs[0]
    dim, rows = x.shape[-1], prod(x.shape[:-1])
    choice = ctx.tuning.pick("elementwise", elements=x.elements)
    wg = workgroup_size(ctx.caps, choice["wg_size"], dim)
    gz = ceil_div(rows, MAX_GROUPS_X)
    return [
        Dispatch(
            Variant("argsort/argsort.comp", (("DESCENDING", int(descending)), ("WG_SIZE", wg))),
            (Arg(x), Arg(y, "w")),
            pack_push(rows, dim, y.shape[-1]),
            (ceil_div(dim, wg), ceil_div(rows, gz), gz),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=nbytes(x) + nbytes(y),
        )
    ]


def _order(x: Array, *, descending: bool) -> Array:
    values = np.asarray(x, np.float64)
    return np.argsort(-values if descending else values, axis=-1, kind="stable").astype(np.int32)


def _coarse(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of a coarse grid, so that many are equal."""
    return (rng.integers(-20, 20, shape) / 4).astype(np.float32)


EXACT = Tolerance(0.0, 0.0, "comparisons are exact")

SHAPES: tuple[Shape, ...] = ((1,), (2,), (1, 7), (16, 10, 10), (60, 10, 10), (1, 512), (1, 1025), (3, 2047), (2, 8192))
"""Of the full set."""


@register
class ArgSort(Op):
    """ARGSORT(x F32 [..., dim]; order "asc" | "desc") -> I32 [..., dim]; of equal values the lower index comes first."""

    name = "ARGSORT"
    arithmetic = moves_values
    peer_nmse = 0.0

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [_order(inputs[0], descending=params["order"] == "desc")]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y, order = node.inputs[0], node.outputs[0], node.params["order"]
        if order not in ("asc", "desc") or y.type != "I32" or y.shape != x.shape:
            raise PlanError(f"[ARGSORT] {node.name}: {x} to {y}, order {order!r}: expected I32 of its shape, order 'asc' or 'desc'")
        return _ranked(node, ctx, descending=order == "desc")

    def cases(self) -> Iterator[Case]:
        for order in ("asc", "desc"):
            for shape in ((2, 16), (3, 2, 60), (1, 1023), (4, 1)):
                yield self.build_case(shape, order)

    def full_cases(self) -> Iterator[Case]:
        for order, shape in product(("asc", "desc"), SHAPES):
            yield self.build_case(shape, order)

    def build_case(self, ne: Shape, order: str, seed: int = 43) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            node = Node("ARGSORT", (Tensor("x", "F32", ne, "input"),), (Tensor("y", "I32", ne),), {"order": order})
            return Problem(node, {"x": _coarse(ne, rng)})

        return Case("ARGSORT", {"ne": ne, "order": order, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT


@register
class TopK(Op):
    """TOP_K(x F32 [..., dim]) -> I32 [..., k]: indices of the k largest of each row, the largest first, of equal ones the lower index."""

    name = "TOP_K"
    arithmetic = moves_values
    peer_nmse = 0.0

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [_order(inputs[0], descending=True)[..., : params["k"]]]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y, k = node.inputs[0], node.outputs[0], node.params["k"]
        if not 1 <= k <= x.shape[-1] or y.type != "I32" or y.shape != (*x.shape[:-1], k):
            raise PlanError(f"[TOP_K] {node.name}: k = {k} of {x} to {y}: expected 1 to {x.shape[-1]}, I32 with k columns")
        return _ranked(node, ctx, descending=True)

    def cases(self) -> Iterator[Case]:
        for shape, k in (((2, 16), 1), ((3, 2, 60), 7), ((1, 1023), 40), ((4, 5), 5)):
            yield self.build_case(shape, k)

    def full_cases(self) -> Iterator[Case]:
        for shape in SHAPES:
            for k in sorted({1, 2, 40, shape[-1] // 2, shape[-1] - 1, shape[-1]}):
                if 1 <= k <= shape[-1]:
                    yield self.build_case(shape, k)

    def build_case(self, ne: Shape, k: int, seed: int = 47) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            y = Tensor("y", "I32", (*ne[:-1], k))
            return Problem(Node("TOP_K", (Tensor("x", "F32", ne, "input"),), (y,), {"k": k}), {"x": _coarse(ne, rng)})

        return Case("TOP_K", {"ne": ne, "k": k, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT

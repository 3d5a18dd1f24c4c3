"""ARGSORT (shaders/argsort): every value counts its rank, so time grows with the square of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    Tolerance,
    ceil_div,
    nbytes,
    pack_push,
    register,
)
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant


@register
class ArgSort(Op):
    """ARGSORT(x F32 [..., dim]; order "asc" | "desc") -> I32 [..., dim]; of equal values the lower index comes first."""

    name = "ARGSORT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        return [np.argsort(-x if params["order"] == "desc" else x, axis=-1, kind="stable").astype(np.int32)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if node.params["order"] not in ("asc", "desc") or y.type != "I32" or y.shape != x.shape:
            order = node.params["order"]
            raise PlanError(f"[ARGSORT] {node.name}: {x} to {y}, order {order!r}: expected I32 of its shape, order 'asc' or 'desc'")
        dim, rows = x.shape[-1], prod(x.shape[:-1])
        choice = ctx.tuning.pick("elementwise", elements=x.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], dim)
        gz = ceil_div(rows, MAX_GROUPS_X)
        return [
            Dispatch(
                Variant("argsort/argsort.comp", (("DESCENDING", int(node.params["order"] == "desc")), ("WG_SIZE", wg)), (), None),
                (Arg(x), Arg(y, "w")),
                pack_push(rows, dim),
                (ceil_div(dim, wg), ceil_div(rows, gz), gz),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=nbytes(x) + nbytes(y),
            )
        ]

    def cases(self) -> Iterator[Case]:
        for order in ("asc", "desc"):
            for shape in ((2, 16), (3, 2, 60), (1, 1023), (4, 1)):
                yield self.case(shape, order)

    def case(self, shape: tuple[int, ...], order: str, *, seed: int = 43) -> Case:
        """Values of a coarse grid, so that many are equal."""

        def make(rng: np.random.Generator) -> Problem:
            node = Node("ARGSORT", (Tensor("x", "F32", shape, "input"),), (Tensor("y", "I32", shape),), {"order": order})
            return Problem(node, {"x": (rng.integers(-20, 20, shape) / 4).astype(np.float32)})

        return Case("ARGSORT", {"ne": shape, "order": order, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "comparisons are exact")

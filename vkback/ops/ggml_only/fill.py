"""FILL, ARANGE, DIAG, DIAG_MASK_INF and TRI (shaders/fill): values by their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext
from vkback.ops.op import Op, register


def triangle(kind: int) -> tuple[int, bool]:
    """`first` and `upper` of shaders/fill/fill.comp: upper keeps columns from row + first on, lower those before."""
    return {0: (0, True), 1: (1, True), 2: (1, False), 3: (0, False)}[kind]


class Filled(Op):
    """An op of fill.comp. function: its number there."""

    function = 0

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "values are placed, not computed")

    def push(self, params: Mapping[str, Any]) -> tuple[int, int, float, float]:
        """first, upper, a, b."""
        return 0, 0, 0.0, 0.0

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y = node.outputs[0]
        rows, columns = (1, *y.shape)[-2:]
        args = (Arg(y, "w"), *map(Arg, node.inputs))
        push = (y.elements, rows, columns, *self.push(node.params))
        return [by_threads(node, ctx, "fill/fill.comp", args, push, y.elements, {"FUNCTION": self.function})]

    def case_of(self, shown: Mapping[str, Any], out: Shape, params: Mapping[str, Any], seed: int, x: Shape = ()) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            inputs = (Tensor("x", "F32", x, "input"),) if x else ()
            node = Node(self.name, inputs, (Tensor("y", "F32", out),), params)
            return Problem(node, {"x": rng.uniform(-1, 1, x).astype(np.float32)} if x else {})

        return Case(self.name, {**shown, "seed": seed}, make, seed)


@register
class Fill(Filled):
    """FILL(; c, shape) -> F32, c everywhere."""

    name = "FILL"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.full(params["shape"], np.float64(np.float32(params["c"])))]

    def push(self, params: Mapping[str, Any]) -> tuple[int, int, float, float]:
        return 0, 0, float(params["c"]), 0.0

    def build_case(self, type: str = "f32", ne: Shape = (10, 10, 4, 3), c: float = 0.0, seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        return self.case_of({"type": "f32", "ne": ne_of(shape), "c": c}, shape, {"c": c, "shape": shape}, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(11, 10, 4, 3), c=-152.5)


@register
class Arange(Filled):
    """ARANGE(; start, stop, step) -> F32: start, start + step, ... before stop."""

    name = "ARANGE"
    function = 1

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [params["start"] + params["step"] * np.arange(_count(params), dtype=np.float64)]

    def push(self, params: Mapping[str, Any]) -> tuple[int, int, float, float]:
        return 0, 0, float(params["start"]), float(params["step"])

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-13, 1e-6, "a product and a sum in f32")

    def build_case(self, type: str = "f32", start: float = 0.0, stop: float = 10.0, step: float = 1.0, seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        params = {"start": start, "stop": stop, "step": step}
        if step == 0 or not 0 < (stop - start) / step <= 1e9:
            raise CaseLineError(f"start={start}, stop={stop}, step={step}: expected steps that lead from start to stop")
        return self.case_of({"type": "f32", **params}, sized((_count(params),)), params, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(start=1.5, stop=-99.0, step=-0.75)


def _count(params: Mapping[str, Any]) -> int:
    steps: float = (params["stop"] - params["start"]) / params["step"]
    return ceil(steps)


@register
class Diag(Filled):
    """DIAG(x F32 [b3, b2, 1, n]) -> F32 [b3, b2, n, n] with x on the diagonal."""

    name = "DIAG"
    function = 2

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        return [np.swapaxes(x, -1, -2) * np.eye(x.shape[-1])]

    def build_case(self, type: str = "f32", ne: Shape = (10, 1, 4, 3), seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if shape[2] != 1:
            raise CaseLineError(f"ne={list(ne)}: expected one row a batch")
        return self.case_of({"type": "f32", "ne": ne_of(shape)}, sized((*shape[:2], shape[3], shape[3])), {}, seed, shape)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()


@register
class DiagMaskInf(Filled):
    """DIAG_MASK_INF(x F32; n_past) -> x, but -inf where column > row + n_past."""

    name = "DIAG_MASK_INF"
    function = 3

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        rows, columns = np.indices(x.shape[-2:])
        return [np.where(columns > rows + params["n_past"], -np.inf, x)]

    def push(self, params: Mapping[str, Any]) -> tuple[int, int, float, float]:
        return int(params["n_past"]), 0, 0.0, 0.0

    def build_case(self, type: str = "f32", ne: Shape = (10, 10, 3, 2), n_past: int = 5, seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        return self.case_of({"type": "f32", "ne": ne_of(shape), "n_past": n_past}, shape, {"n_past": n_past}, seed, shape)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()


@register
class Tri(Filled):
    """TRI(x F32; tri_type) -> x, but 0 outside of a triangle: 0 the upper with the diagonal, 1 without, 2 the lower with it, 3 without."""

    name = "TRI"
    function = 4

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, kind = np.asarray(inputs[0], np.float64), params["tri_type"]
        return [np.triu(x, 1 if kind == 1 else 0) if kind < 2 else np.tril(x, -1 if kind == 3 else 0)]

    def push(self, params: Mapping[str, Any]) -> tuple[int, int, float, float]:
        first, upper = triangle(params["tri_type"])
        return first, int(upper), 0.0, 0.0

    def build_case(self, type: str = "f32", ne: Shape = (10, 10, 4, 3), tri_type: int = 0, seed: int = 3) -> Case:
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if tri_type not in (0, 1, 2, 3):
            raise CaseLineError(f"tri_type={tri_type}: expected 0 to 3")
        return self.case_of({"type": "f32", "ne": ne_of(shape), "tri_type": tri_type}, shape, {"tri_type": tri_type}, seed, shape)

    def cases(self) -> Iterator[Case]:
        for kind in range(4):
            yield self.build_case(ne=(7, 5, 2, 1), tri_type=kind)

"""RMS_NORM_BACK, NORM_BACK and the gradients of their weights and bias (shaders/norm/back.comp, weight_back.comp)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_rows, by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import register
from vkback.ops.storage import nbytes
from vkback.ops.training.column_sums import blocks_of, column_sums
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.workgroup import workgroup_size

TOLERANCE = Tolerance(
    1e-11, 1e-4, "f32 sums of a row's values, relative error about 2^-24 sqrt(dim); terms of the sum that cancel are as large as dx"
)


def normed(x: Array, eps: float, center: bool) -> tuple[Array, Array]:
    """Rows normed, and the factor of each, 1 / sqrt(mean square + eps)."""
    if center:
        x = x - x.mean(axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale, scale


class _Back(Gradient):
    """What the gradients have in common; center: of NORM."""

    center: ClassVar[bool] = False
    cost: ClassVar[Cost] = {"fmul": 7, "fadd": 5}

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def _row_kernel(self, node: Node, ctx: LowerContext, shader: str, args: Sequence[Arg], weight: int | None) -> Dispatch:
        """A workgroup a row of x."""
        x = node.inputs[1]
        dim, rows = x.shape[-1], prod(x.shape[:-1])
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], ceil_div(dim, 4))
        defines = {"CENTER": int(self.center)} | ({} if weight is None else {"WEIGHT": weight})
        push = (rows, dim, float(node.params["eps"]))
        return by_rows(node, ctx, shader, args, push, rows, wg, choice, defines, flops=12 * x.elements)

    def _inputs(self, rng: np.random.Generator, shape: Shape, weighted: bool) -> tuple[list[Tensor], dict[str, Array]]:
        inputs = [Tensor(name, "F32", shape, "input") for name in ("dy", "x")]
        values = {"dy": rng.uniform(-1, 1, shape).astype(np.float32), "x": rng.uniform(-0.7, 1.3, shape).astype(np.float32)}
        if weighted:
            inputs.append(Tensor("w", "F32", shape[-1:], "input"))
            values["w"] = rng.uniform(0.5, 1.5, shape[-1]).astype(np.float32)
        return inputs, values


class _InputBack(_Back):
    """(dy, x [..., dim] [, w [dim]]; eps) -> dx, which may be dy or x."""

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, x, *w = (np.asarray(i, np.float64) for i in inputs)
        n, scale = normed(x, params["eps"], self.center)
        g = dy * w[0] if w else dy
        level = g.mean(axis=-1, keepdims=True) if self.center else 0.0
        return [scale * (g - level - n * np.mean(g * n, axis=-1, keepdims=True))]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        g = np.asarray(inputs[0], np.float64) * (np.asarray(inputs[2], np.float64) if len(inputs) > 2 else 1.0)
        return against(g, lambda x: normed(x, params["eps"], self.center)[0], inputs[1])

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, x, *w = node.inputs
        dx = node.outputs[0]
        if dy.elements != x.elements or dx.elements != x.elements or (w and w[0].elements != x.shape[-1]):
            given = ", ".join(map(str, (*node.inputs, dx)))
            raise PlanError(f"[{self.name}] {node.name}: {given}: expected dy and dx as x, w of a row's size")
        args = (Arg(dy), Arg(x), Arg(dx, "w"), *map(Arg, w))
        return [self._row_kernel(node, ctx, "norm/back.comp", args, len(w))]

    def build_case(
        self, type: str = "f32", ne: Shape = (64, 5, 4, 3), eps: float = 1e-6, weight: bool = False, inplace: bool = False, seed: int = 11
    ) -> Case:
        """inplace: dx replaces dy."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)

        def make(rng: np.random.Generator) -> Problem:
            inputs, values = self._inputs(rng, shape, weight)
            out = inputs[0] if inplace else Tensor("dx", "F32", shape)
            return Problem(Node(self.name, tuple(inputs), (out,), {"eps": eps}), values)

        shown = {"type": "f32", "ne": ne_of(shape), "eps": eps, "weight": int(weight), "inplace": int(inplace), "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 1, 1), eps=1e-5)
        yield self.build_case(ne=(576, 2, 1, 1), weight=True)
        yield self.build_case(ne=(64, 5, 2, 1), eps=4.0, inplace=True)

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in ((5, 3), (31, 5), (1024, 7), (4096, 3), (16896, 2)):
            for weight in (False, True):
                yield self.build_case(ne=(dim, rows, 1, 1), eps=1e-5, weight=weight)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(4096, 512, 1, 1), weight=True)


@register
class RmsNormBack(_InputBack):
    """RMS_NORM_BACK(dy, x [, w]; eps) -> dx."""

    name = "RMS_NORM_BACK"


@register
class NormBack(_InputBack):
    """NORM_BACK(dy, x [, w]; eps) -> dx."""

    name = "NORM_BACK"
    center = True


class _WeightBack(_Back):
    """(dy, x [..., dim]; eps) -> dw [dim] and, of NORM, db [dim]."""

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, x = (np.asarray(i, np.float64) for i in inputs)
        rows = tuple(range(x.ndim - 1))
        products = (dy * normed(x, params["eps"], self.center)[0]).sum(axis=rows)
        return [products, dy.sum(axis=rows)] if self.center else [products]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        n, _ = normed(np.asarray(inputs[1], np.float64), params["eps"], self.center)
        one = np.ones(n.shape[-1])
        forward: Callable[..., Array] = (lambda w, b: n * w + b) if self.center else (lambda w: n * w)
        return against(inputs[0], forward, *((one, one) if self.center else (one,)))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, x = node.inputs
        dim, rows = x.shape[-1], prod(x.shape[:-1])
        if dy.elements != x.elements or len(node.outputs) != 1 + self.center or any(t.elements != dim for t in node.outputs):
            given = ", ".join(map(str, (dy, x, *node.outputs)))
            raise PlanError(f"[{self.name}] {node.name}: {given}: expected dy as x, and {dim} sums in each output")
        scale = Tensor(f"{node.name}.scale", "F32", (rows, 2))
        block, blocks = blocks_of(rows)
        sums = tuple(node.outputs)
        if blocks > 1:
            sums = tuple(Tensor(f"{t.name}.blocks", "F32", (blocks, dim)) for t in node.outputs)
        dispatches = [
            self._row_kernel(node, ctx, "norm/row_scale.comp", (Arg(x), Arg(scale, "w")), None),
            by_threads(
                node,
                ctx,
                "norm/weight_back.comp",
                (Arg(dy), Arg(x), Arg(scale), *(Arg(t, "w") for t in sums)),
                (rows, dim, block),
                dim,
                {"CENTER": int(self.center)},
                grid=(blocks, 1),
                how=f", {block} rows each",
                moved=nbytes(dy) + nbytes(x),
                flops=5 * x.elements,
            ),
        ]
        if blocks > 1:
            for part, whole in zip(sums, node.outputs, strict=True):
                dispatches += column_sums(node, ctx, part, whole, blocks, dim)
        return dispatches

    def build_case(self, ne: Shape, eps: float = 1e-6, seed: int = 11) -> Case:
        shape = shape_of(ne)

        def make(rng: np.random.Generator) -> Problem:
            inputs, values = self._inputs(rng, shape, False)
            outputs = tuple(Tensor(name, "F32", shape[-1:]) for name in ("dw", "db")[: 1 + self.center])
            return Problem(Node(self.name, tuple(inputs), outputs, {"eps": eps}), values)

        return Case(self.name, {"ne": ne_of(shape), "eps": eps, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case((37, 5, 3, 1), 1e-5)
        yield self.build_case((64, 67, 1, 1))

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in ((2, 3), (576, 512), (4096, 33), (16896, 17), (5, 9000)):
            yield self.build_case((dim, rows, 1, 1))

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case((4096, 512, 1, 1))


@register
class RmsNormWeightBack(_WeightBack):
    """RMS_NORM_WEIGHT_BACK(dy, x; eps) -> dw."""

    name = "RMS_NORM_WEIGHT_BACK"


@register
class NormWeightBack(_WeightBack):
    """NORM_WEIGHT_BACK(dy, x; eps) -> dw, db."""

    name = "NORM_WEIGHT_BACK"
    center = True

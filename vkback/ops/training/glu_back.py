"""SILU_BACK, GELU_BACK, SWIGLU_BACK, GEGLU_BACK (shaders/glu/back.comp): gradients of activations and of gated linear units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.glu import gelu, gelu_erf, gelu_quick, sigmoid
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import register
from vkback.ops.training.gradients import Gradient, Scalar, against


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def silu_slope(x: Array) -> Array:
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def gelu_slope(x: Array) -> Array:
    a = math.sqrt(2.0 / math.pi)
    t: Array = np.tanh(a * x * (1.0 + 0.044715 * x * x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * a * (1.0 + 3 * 0.044715 * x * x)


def gelu_erf_slope(x: Array) -> Array:
    erf: Array = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0))
    return 0.5 * (1.0 + erf) + x / math.sqrt(2.0 * math.pi) * np.exp(-0.5 * x * x)


def gelu_quick_slope(x: Array) -> Array:
    s = sigmoid(1.702 * x)
    return s * (1.0 + 1.702 * x * (1.0 - s))


FORMS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "silu": (silu, silu_slope),
    "gelu": (gelu, gelu_slope),
    "gelu_erf": (gelu_erf, gelu_erf_slope),
    "gelu_quick": (gelu_quick, gelu_quick_slope),
}
"""Activations and their derivatives."""


class _ActivationBack(Gradient):
    """Inputs dy, x, or dy, gate, up; outputs dx, or dgate and dup, which may be among the inputs. Param form, where `forms` has several."""

    forms: ClassVar[tuple[str, ...]]
    gated: ClassVar[bool] = False
    cost: ClassVar[Cost] = {"fmul": 8, "fadd": 5, "fdiv": 1, "fexp": 1}

    def form(self, params: Mapping[str, Any]) -> str:
        return str(params.get("form", self.forms[0]))

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, x, *up = (np.asarray(i, np.float64) for i in inputs)
        f, slope = FORMS[self.form(params)]
        return [dy * up[0] * slope(x), dy * f(x)] if up else [dy * slope(x)]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        f = FORMS[self.form(params)][0]
        if self.gated:
            return against(inputs[0], lambda gate, up: f(gate) * up, *inputs[1:])
        return against(inputs[0], f, inputs[1])

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if any(t.elements != node.inputs[0].elements for t in (*node.inputs, *node.outputs)):
            given = ", ".join(map(str, (*node.inputs, *node.outputs)))
            raise PlanError(f"[{self.name}] {node.name}: {given}: expected as many values in each")
        if self.form(node.params) not in self.forms:
            raise PlanError(f"[{self.name}] {node.name}: form {self.form(node.params)!r}: expected one of {', '.join(self.forms)}")
        dy, x, *up = node.inputs
        dx, *dup = node.outputs
        args = (Arg(dy), Arg(x), Arg(dx, "w"), *map(Arg, up), *(Arg(t, "w") for t in dup))
        defines: dict[str, str | int] = {"ACTIVATION": self.form(node.params), "GATED": int(self.gated)}
        return [by_threads(node, ctx, "glu/back.comp", args, (dy.elements,), dy.elements, defines, flops=16 * dy.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if self.form(node.params) == "gelu_erf":
            return Tolerance(1e-11, 1e-5, "f32, an error function within 1.5e-7")
        return Tolerance(
            1e-11, 3e-5, "f32; exp has 3 + 2|x| ulp by Vulkan's rules, which matters only where it is not much larger or smaller than 1"
        )

    def _problem(self, rng: np.random.Generator, shape: Shape, size: float, inplace: bool, form: str) -> Problem:
        names = ("dy", "gate", "up") if self.gated else ("dy", "x")
        inputs = tuple(Tensor(name, "F32", shape, "input") for name in names)
        values = {t.name: (rng.uniform(-1, 1, shape) * (1.0 if t.name == "dy" else size)).astype(np.float32) for t in inputs}
        outputs = inputs[1:] if inplace else tuple(Tensor(f"d{name}", "F32", shape) for name in names[1:])
        return Problem(Node(self.name, inputs, outputs, {} if form == self.forms[0] else {"form": form}), values)

    def build_case(self, ne: Shape, form: str = "", inplace: bool = False, size: float = 4.0, seed: int = 5) -> Case:
        """Values uniform in +-size, dy in +-1. inplace: the gradients replace what they belong to."""
        shape = shape_of(ne)
        form = form or self.forms[0]
        if form not in self.forms:
            raise CaseLineError(f"{self.name}: form={form}: expected one of {', '.join(self.forms)}")
        shown: dict[str, Any] = {"ne": ne_of(shape)} | ({"form": form} if len(self.forms) > 1 else {})
        shown |= {"inplace": int(inplace), "size": size, "seed": seed}
        return Case(self.name, shown, lambda rng: self._problem(rng, shape, size, inplace, form), seed)

    def cases(self) -> Iterator[Case]:
        for form in self.forms:
            yield self.build_case((37, 3), form)
        yield self.build_case((64, 5), inplace=True)

    def full_cases(self) -> Iterator[Case]:
        for form in self.forms:
            for size in (1e-3, 1.0, 60.0):
                yield self.build_case((1536, 7), form, size=size)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case((1536, 512))


@register
class SiluBack(_ActivationBack):
    """SILU_BACK(dy, x) -> dx."""

    name = "SILU_BACK"
    forms = ("silu",)

    def build_case(  # type: ignore[override]
        self, type: str = "f32", ne: Shape = (64, 5, 4, 3), eps: float = 1e-6, inplace: bool = False, size: float = 4.0, seed: int = 5
    ) -> Case:
        """eps stands in ggml's lines and means nothing to this op; see the base's."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        shown = {"type": "f32", "ne": ne_of(shape), "eps": eps, "inplace": int(inplace), "size": size, "seed": seed}
        return Case(self.name, shown, lambda rng: self._problem(rng, shape, size, inplace, "silu"), seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 1, 1))
        yield self.build_case(ne=(64, 5, 1, 1), inplace=True, size=60.0)

    def full_cases(self) -> Iterator[Case]:
        for size in (1e-3, 1.0, 60.0):
            yield self.build_case(ne=(1536, 7, 1, 1), size=size)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(1536, 512, 1, 1))


@register
class GeluBack(_ActivationBack):
    """GELU_BACK(dy, x; form) -> dx."""

    name = "GELU_BACK"
    forms = ("gelu", "gelu_erf", "gelu_quick")


@register
class SwigluBack(_ActivationBack):
    """SWIGLU_BACK(dy, gate, up) -> dgate, dup."""

    name = "SWIGLU_BACK"
    forms = ("silu",)
    gated = True


@register
class GegluBack(_ActivationBack):
    """GEGLU_BACK(dy, gate, up; form) -> dgate, dup."""

    name = "GEGLU_BACK"
    forms = ("gelu", "gelu_erf", "gelu_quick")
    gated = True

"""Ops on single values (shaders/elementwise): ADD, SUB, MUL, DIV with a repeated second operand, and functions of one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops import cost as costs
from vkback.ops.base import (
    OPS,
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
    declare,
    nbytes,
    pack_push,
    register,
    spread,
)
from vkback.ops.cost import Cost
from vkback.ops.glu import (
    GELU_COST,
    GELU_ERF_COST,
    GELU_QUICK_COST,
    SIGMOID_COST,
    TANH_COST,
    gelu,
    gelu_erf,
    gelu_quick,
    sigmoid,
)
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

declare("elementwise", match={"elements": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})


def repetition(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int] | None:
    """(inner, count): value i of a meets value (i / inner) % count of b, b being broadcast as numpy does; None where that takes more.

    b may lack or have ones for leading axes, equal a in the middle, and have ones for trailing axes.
    """
    if prod(a) == prod(b):
        return 1, prod(b)
    b = (1,) * (len(a) - len(b)) + b
    if len(b) != len(a):
        return None
    end = len(a)
    while end and b[end - 1] == 1:
        end -= 1
    start = end
    while start and b[start - 1] == a[start - 1]:
        start -= 1
    if any(n != 1 for n in b[:start]):
        return None
    return prod(a[end:]), prod(b)


BINARY: Mapping[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "ADD": ("+", np.add),
    "SUB": ("-", np.subtract),
    "MUL": ("*", np.multiply),
    "DIV": ("/", np.divide),
}
"""GLSL operator and reference of each op of two operands."""


def tiles(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether whole copies of b fill a along every axis."""
    return len(b) <= len(a) <= 4 and all(big % small == 0 for big, small in zip(a[len(a) - len(b) :], b, strict=True))


TIMES: tuple[Shape, ...] = (
    (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2), (2, 2, 2, 2),
)  # fmt: skip
"""How often b is repeated along each axis, in the full set."""

PAIRS: tuple[tuple[Shape, Shape], ...] = (
    ((1, 1, 8, 1), (1, 1, 8, 1)), ((16, 10, 9), (16, 10, 9)), ((16, 10, 9), (10, 9)), ((16, 10, 9), (9,)), ((16, 10, 9), (1,)),
    ((16, 10, 8), (16, 10, 1)), ((16, 10, 9), (16, 1, 1)), ((4, 16, 10, 32), (16, 1, 1)), ((5, 7, 11, 13), (7, 11, 13)),
    ((5, 7, 11, 13), (1, 1, 1, 13)), ((5, 7, 11, 13), (1, 7, 1, 1)), ((1, 1), (1, 1)), ((1, 2880), (2880,)), ((33, 4096), (4096,)),
    ((1000, 13), (13,)), ((4100, 13), (4100, 13)), ((2, 3, 70001), (1,)), ((8_400_000,), (1,)), ((8_400_001,), (1,)),
)  # fmt: skip
"""Shapes of a and b in the full set."""


class Binary(Op):
    """An op of BINARY: (a, b) -> value by value, b repeated along any axis until it fills a."""

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        kind = {"ADD": "fadd", "SUB": "fadd", "MUL": "fmul", "DIV": "fdiv"}[self.name]
        return {kind: node.outputs[0].elements}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, b = (np.asarray(i, np.float64) for i in inputs)
        if a.size == b.size:
            return [BINARY[self.name][1](a, b.reshape(a.shape))]
        b = b.reshape((1,) * (a.ndim - b.ndim) + b.shape)
        return [BINARY[self.name][1](a, np.tile(b, [big // small for big, small in zip(a.shape, b.shape, strict=True)]))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, b = node.inputs
        y = node.outputs[0]
        found = repetition(a.shape, b.shape)
        if (found is None and not tiles(a.shape, b.shape)) or y.elements != a.elements:
            raise PlanError(f"[{self.name}] {node.name}: {b} cannot be repeated to fill {a}, or the output {y} is not of its size")
        if found is None:  # the kernel counts through b once for every repetition; what takes more is laid out first
            whole = Tensor(f"{node.name}.b", b.type, a.shape)
            repeated = OPS["REPEAT"].lower(Node("REPEAT", (b,), (whole,), {"shape": a.shape}), ctx)
            return repeated + self.lower(Node(node.op, (a, whole), node.outputs, node.params), ctx)
        inner, count = found
        width = 4 if a.elements % 4 == 0 and (inner % 4 == 0 or (inner == 1 and count % 4 == 0)) else 1
        b_width = width if inner == 1 else 1
        elements = a.elements // width
        choice = ctx.tuning.pick("elementwise", elements=a.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], elements)
        defines: dict[str, str | int] = {"WG_SIZE": wg, "OPERATOR": BINARY[self.name][0], "WIDTH": width, "B_WIDTH": b_width}
        return [
            Dispatch(
                Variant("elementwise/binary.comp", tuple(sorted(defines.items()))),
                (Arg(a), Arg(b), Arg(y, "w")),
                pack_push(elements, max(inner // width, 1), count // b_width),
                spread(ceil_div(elements, wg)),
                node.op,
                node.name,
                f"{wg} threads of {width} values: {choice.source}",
                nbytes=nbytes(a) + nbytes(b) + nbytes(y),
                flops=a.elements,
            )
        ]

    def cases(self) -> Iterator[Case]:
        for a, b in (
            ((1, 4096), (1, 4096)), ((3, 4096), (4096,)), ((5, 37), (37,)), ((7, 5), (7, 5)), ((2, 4, 64), (4, 64)),
            ((2, 4, 64), (2, 4, 1)), ((3, 4, 10), (3, 4, 1)), ((3, 4, 10), (4, 1)), ((1, 1), (1,)), ((9, 16), (1, 1)),
            ((4, 6, 10), (2, 3, 10)),
        ):
            yield self.build_case(a, b)

    def full_cases(self) -> Iterator[Case]:
        for small, times in product(((3, 4, 5, 10), (1, 2, 16, 32)), TIMES):
            yield self.build_case(tuple(s * t for s, t in zip(small, times, strict=True)), small)
        for a, b in PAIRS:
            yield self.build_case(a, b)

    def perf_cases(self) -> Iterator[Case]:
        if self.name == "ADD":
            for n in (1, 512):
                yield self.build_case((n, 4096), (n, 4096))

    def build_case(self, ne: Shape, b: Shape, seed: int = 2) -> Case:
        """a [ne] uniform in +-1, b in 0.5..1.5, away from zero for DIV."""

        def make(rng: np.random.Generator) -> Problem:
            node = Node(self.name, (Tensor("a", "F32", ne, "input"), Tensor("b", "F32", b, "input")), (Tensor("y", "F32", ne),))
            return Problem(node, {"a": rng.uniform(-1, 1, ne).astype(np.float32), "b": rng.uniform(0.5, 1.5, b).astype(np.float32)})

        return Case(self.name, {"ne": ne, "b": b, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-13, 1e-6, "one f32 operation: 2^-24, a division 2.5 ulp")


for _name in BINARY:
    _facts = {"name": _name, "formula": f"x{BINARY[_name][0]}y", "__doc__": f"{_name}(a, b).", "__module__": __name__}
    register(type(_name.title(), (Binary,), _facts))


@dataclass(frozen=True)
class Function:
    """function: its name in shaders/elementwise; params: the node's parameters that are p.a and p.b there, with values for the cases;
    domain: where the cases take x from; others: further values of the parameters, for the full set; cost: of a value."""

    function: str
    formula: Callable[..., Array]
    domain: tuple[float, float] = (-4.0, 4.0)
    cost: Cost = field(default_factory=dict)
    params: tuple[tuple[str, float], ...] = ()
    others: tuple[tuple[float, ...], ...] = ()


UNARY: Mapping[str, Function] = {
    "SCALE": Function(
        "scale", lambda x, scale, bias: x * scale + bias, params=(("scale", 0.625), ("bias", -1.5)),
        others=((2.0, 0.0), (2.0, 1.0), (0.0, -1.0), (-1e-3, 0.0)), cost={"fmul": 1, "fadd": 1},
    ),
    "CLAMP": Function("clamp_to", np.clip, params=(("min", -0.5), ("max", 1.25)), others=((-0.25, 0.25), (0.0, 4.0), (1.0, 1.0))),
    "LEAKY_RELU": Function(
        "leaky_relu", lambda x, slope: np.maximum(x, 0.0) + slope * np.minimum(x, 0.0), params=(("negative_slope", 0.125),),
        others=((0.0,), (1.0,), (-0.5,)), cost={"fmul": 1},
    ),
    "SILU": Function("silu", lambda x: x * sigmoid(x), (-100.0, 100.0), cost=SIGMOID_COST),
    "SIGMOID": Function("sigmoid", sigmoid, (-20.0, 20.0), cost=SIGMOID_COST),
    "GELU": Function("gelu", gelu, cost=GELU_COST),
    "GELU_ERF": Function("gelu_erf", gelu_erf, cost=GELU_ERF_COST),
    "GELU_QUICK": Function("gelu_quick", gelu_quick, cost=GELU_QUICK_COST),
    "RELU": Function("relu", lambda x: np.maximum(x, 0.0)),
    "TANH": Function("tanh_exact", np.tanh, cost=TANH_COST),
    "EXP": Function("exp", np.exp, cost={"fexp": 1}),
    "ELU": Function("elu", lambda x: np.maximum(x, 0.0) + np.expm1(np.minimum(x, 0.0)), cost={"fadd": 1, "fexp": 1}),
    "SOFTPLUS": Function("softplus", lambda x: np.logaddexp(0.0, x), (-30.0, 30.0), cost={"fadd": 1, "fexp": 2}),
    "HARDSIGMOID": Function("hardsigmoid", lambda x: np.clip((x + 3.0) / 6.0, 0.0, 1.0), cost={"fmul": 1, "fadd": 1}),
    "HARDSWISH": Function("hardswish", lambda x: x * np.clip((x + 3.0) / 6.0, 0.0, 1.0), cost={"fmul": 2, "fadd": 1}),
    "NEG": Function("neg", np.negative, cost={"fadd": 1}),
    "ABS": Function("abs", np.abs),
    "SGN": Function("sign", np.sign),
    "STEP": Function("step_up", lambda x: np.heaviside(x, 0.0)),
    "SQR": Function("sqr", np.square, cost={"fmul": 1}),
    "SQRT": Function("sqrt", np.sqrt, (0.0, 100.0), cost={"sqrt": 1}),
    "LOG": Function("log", np.log, (1e-3, 100.0), cost={"fexp": 1}),
    "FLOOR": Function("floor", np.floor),
    "CEIL": Function("ceil", np.ceil),
}
"""Ops of one operand."""


class Unary(Op):
    """An op of UNARY: x -> value by value."""

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return costs.times(UNARY[self.name].cost, node.outputs[0].elements)

    def _values(self, params: Mapping[str, Any]) -> list[float]:
        missing = [name for name, _ in UNARY[self.name].params if name not in params]
        if missing:
            raise PlanError(f"[{self.name}] parameters missing: {', '.join(missing)}")
        return [float(params[name]) for name, _ in UNARY[self.name].params]

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [UNARY[self.name].formula(np.asarray(inputs[0], np.float64), *self._values(params))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if x.elements != y.elements:
            raise PlanError(f"[{self.name}] {node.name}: output {y} has other elements than {x}")
        width = 4 if x.elements % 4 == 0 else 1
        elements = x.elements // width
        choice = ctx.tuning.pick("elementwise", elements=x.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], elements)
        defines: dict[str, str | int] = {"WG_SIZE": wg, "FUNCTION": UNARY[self.name].function, "WIDTH": width}
        return [
            Dispatch(
                Variant("elementwise/unary.comp", tuple(sorted(defines.items()))),
                (Arg(x), Arg(y, "w")),
                pack_push(elements, *[*self._values(node.params), 0.0, 0.0][:2]),
                spread(ceil_div(elements, wg)),
                node.op,
                node.name,
                f"{wg} threads of {width} values: {choice.source}",
                nbytes=nbytes(x) + nbytes(y),
                flops=4 * x.elements,
            )
        ]

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (5, 7, 11)):
            yield self.build_case(shape)

    def full_cases(self) -> Iterator[Case]:
        for shape in ((1,), (3,), (1, 33), (7, 1), (1, 4096), (128, 2, 2, 2), (5, 7, 11, 13), (2, 14336), (3, 70001)):
            yield self.build_case(shape)
        function = UNARY[self.name]
        for some, values in product(((10, 10), (5, 7, 11, 13)), function.others):
            given: dict[str, Any] = {name: value for (name, _), value in zip(function.params, values, strict=True)}
            yield self.build_case(some, **given)

    def build_case(self, ne: Shape, seed: int = 4, **given: float) -> Case:
        """Values uniform over the function's domain; given: parameters in place of the function's usual ones."""
        function = UNARY[self.name]
        params = dict(function.params) | {name: float(value) for name, value in given.items()}

        def make(rng: np.random.Generator) -> Problem:
            node = Node(self.name, (Tensor("x", "F32", ne, "input"),), (Tensor("y", "F32", ne),), params)
            return Problem(node, {"x": rng.uniform(*function.domain, ne).astype(np.float32)})

        return Case(self.name, {"ne": ne, **params, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-4, "f32; Vulkan allows exp 3 + 2|x| ulp and log 3 ulp, erf is good to 1.5e-7")


for _name, _function in UNARY.items():
    _own = {"name": _name, "further": tuple(name for name, _ in _function.params), "__doc__": f"{_name}(x).", "__module__": __name__}
    register(type(_name.title().replace("_", ""), (Unary,), _own))

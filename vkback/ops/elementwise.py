"""Ops on single values (shaders/elementwise): ADD, SUB, MUL, DIV with a repeated second operand, and functions of one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops import cost as costs
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.family import declare
from vkback.ops.general import is_general, lower_general, permuted, rounded_to, stored_tolerance, view_in
from vkback.ops.ggml_words import FLOATS, Four, ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.glu import GELU_COST, GELU_ERF_COST, GELU_QUICK_COST, SIGMOID_COST, TANH_COST, gelu, gelu_erf, gelu_quick, sigmoid
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, Tape, register
from vkback.ops.storage import nbytes
from vkback.ops.view import View

declare("elementwise", match={"elements": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})


def values_of(x: Tensor, ctx: LowerContext) -> int:
    """Of how many values a kernel's width and workgroup are chosen: all, or with --exact those of a row, so that tokens do not count."""
    return x.shape[-1] if ctx.exact else x.elements


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
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 1, 1),
    (1, 2, 2, 1),
    (1, 1, 2, 2),
    (2, 1, 1, 2),
    (2, 2, 2, 2),
)
"""How often b is repeated along each axis, in the full set."""

PAIRS: tuple[tuple[Shape, Shape], ...] = (
    ((1, 1, 8, 1), (1, 1, 8, 1)),
    ((16, 10, 9), (16, 10, 9)),
    ((16, 10, 9), (10, 9)),
    ((16, 10, 9), (9,)),
    ((16, 10, 9), (1,)),
    ((16, 10, 8), (16, 10, 1)),
    ((16, 10, 9), (16, 1, 1)),
    ((4, 16, 10, 32), (16, 1, 1)),
    ((5, 7, 11, 13), (7, 11, 13)),
    ((5, 7, 11, 13), (1, 1, 1, 13)),
    ((5, 7, 11, 13), (1, 7, 1, 1)),
    ((1, 1), (1, 1)),
    ((1, 2880), (2880,)),
    ((33, 4096), (4096,)),
    ((1000, 13), (13,)),
    ((4100, 13), (4100, 13)),
    ((2, 3, 70001), (1,)),
    ((8_400_000,), (1,)),
    ((8_400_001,), (1,)),
)
"""Shapes of a and b in the full set."""


class Binary(Op):
    """An op of BINARY: (a, b) -> value by value, b repeated along any axis until it fills a."""

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        kind = {"ADD": "fadd", "SUB": "fadd", "MUL": "fmul", "DIV": "fdiv"}[self.name]
        return {kind: node.outputs[0].elements}

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """Of a sum dy, of a product dy times the other operand; summed over what an operand was repeated to."""
        if self.name not in ("ADD", "MUL") or (self.name == "MUL" and len(node.inputs) > 2):
            return super().backward(node, dy, tape)
        grads: list[Tensor | None] = []
        for i, x in enumerate(node.inputs):
            if not tape.wants(x):
                grads.append(None)
                continue
            part, whole = dy, x.elements == dy.elements
            if self.name == "MUL":
                part = tape.emit("MUL", x if whole else dy, (dy, node.inputs[1 - i]))
            grads.append(part if whole else tape.emit("REPEAT_BACK", x, (part,), shape=x.shape))
        return grads

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, *more = (np.asarray(i, np.float64) for i in inputs)
        for b in more:
            if b.size != a.size:
                b = b.reshape((1,) * (a.ndim - b.ndim) + b.shape)
                b = np.tile(b, [big // small for big, small in zip(a.shape, b.shape, strict=True)])
            a = BINARY[self.name][1](a, b.reshape(a.shape))
        return [a]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        a, *more = node.inputs
        if len(more) > 1:  # a chain of additions
            first = Tensor(f"{node.name}.1", "F32", a.shape)
            rest = Node(node.op, (first, *more[1:]), node.outputs, node.params)
            return self.lower(Node(node.op, (a, more[0]), (first,), node.params), ctx) + self.lower(rest, ctx)
        b = more[0]
        y = node.outputs[0]
        found = repetition(a.shape, b.shape)
        if (found is None and not tiles(a.shape, b.shape)) or y.elements != a.elements:
            raise PlanError(f"[{self.name}] {node.name}: {b} cannot be repeated to fill {a}, or the output {y} is not of its size")
        if found is None:  # the kernel counts through b once for every repetition; what takes more is laid out first
            whole = Tensor(f"{node.name}.b", b.type, a.shape)
            repeated = OPS["REPEAT"].lower(Node("REPEAT", (b,), (whole,), {"shape": a.shape}), ctx)
            return repeated + self.lower(Node(node.op, (a, whole), node.outputs, node.params), ctx)
        inner, count = found
        values = values_of(a, ctx)
        width = 4 if values % 4 == 0 and (inner % 4 == 0 or (inner == 1 and count % 4 == 0)) else 1
        b_width = width if inner == 1 else 1
        elements = a.elements // width
        choice = ctx.tuning.pick("elementwise", elements=values)
        defines: dict[str, str | int] = {"OPERATOR": BINARY[self.name][0], "WIDTH": width, "B_WIDTH": b_width}
        return [
            by_threads(
                node,
                ctx,
                "elementwise/binary.comp",
                (Arg(a), Arg(b), Arg(y, "w")),
                (elements, max(inner // width, 1), count // b_width),
                elements,
                defines,
                choice=choice,
                needed=values // width,
                how=f" of {width} values",
                moved=nbytes(a) + nbytes(b) + nbytes(y),
                flops=a.elements,
                spins_on=None if y.name in (a.name, b.name) else [a] if b.kind == "weight" else [a, b],
            )
        ]

    def cases(self) -> Iterator[Case]:
        for a, b in (
            ((1, 4096), (1, 4096)),
            ((3, 4096), (4096,)),
            ((5, 37), (37,)),
            ((7, 5), (7, 5)),
            ((2, 4, 64), (4, 64)),
            ((2, 4, 64), (2, 4, 1)),
            ((3, 4, 10), (3, 4, 1)),
            ((3, 4, 10), (4, 1)),
            ((1, 1), (1,)),
            ((9, 16), (1, 1)),
            ((4, 6, 10), (2, 3, 10)),
        ):
            yield self._of_shapes(a, b)
        for a, b in (((1, 4096), (1, 4096)), ((3, 37), (37,))):
            yield self._of_shapes(a, b).where(sync="sentinel")
        if self.name == "ADD":
            yield self.build_case("f16", (10, 5, 4, 3), (2, 1, 1, 2), perm1=1)
            yield self.build_case("bf16", (7, 5, 3, 1), nf=3)
            yield self.build_case("f32", (2, 5, 6, 4), (1, 2, 1, 1), src_overlap=1)

    def full_cases(self) -> Iterator[Case]:
        for small, times in product(((3, 4, 5, 10), (1, 2, 16, 32)), TIMES):
            yield self._of_shapes(tuple(s * t for s, t in zip(small, times, strict=True)), small)
        for a, b in PAIRS:
            yield self._of_shapes(a, b)
        for type, (ne, nr), (perm1, overlap) in product(
            ("f16", "bf16"),
            (((10, 5, 4, 3), (2, 2, 1, 1)), ((1, 1, 640, 1), (32, 32, 1, 1)), ((33, 5, 1, 1), (1, 1, 1, 1))),
            ((0, 0), (1, 0), (0, 1)),
        ):
            yield self.build_case(type, ne, nr, perm1=perm1, src_overlap=overlap)

    def perf_cases(self) -> Iterator[Case]:
        if self.name == "ADD":
            for n in (1, 512):
                yield self._of_shapes((n, 4096), (n, 4096))

    def _of_shapes(self, a: Shape, b: Shape) -> Case:
        small, big = ne_of(b), ne_of(a)
        return self.build_case(ne=small, nr=cast(Four, tuple(x // y for x, y in zip(big, small, strict=True))))

    def build_case(
        self,
        type: str = "f32",
        ne: Shape = (10, 5, 4, 3),
        nr: Four = (1, 1, 1, 1),
        nf: int = 1,
        perm1: int = 0,
        src_overlap: int = 0,
        type_b: str = "",
        seed: int = 2,
    ) -> Case:
        """a of sizes ne * nr, uniform in +-1, and nf times b of sizes ne in 0.5..1.5, away from zero for DIV.

        perm1        b's first two axes are exchanged in memory
        src_overlap  a and b are views of one tensor of which b begins in the middle of a (1), or after a third of it (2)
        """
        kind, small, times = one_of_types(type, FLOATS), shape_of(ne), shape_of(nr, "nr")
        b_kind = one_of_types(type_b, FLOATS, "type_b") if type_b else kind
        big = sized(tuple(s * t for s, t in zip(small, times, strict=True)))
        if nf < 1 or nf > 16 or perm1 not in (0, 1) or src_overlap not in (0, 1, 2):
            given = f"nf={nf}, perm1={perm1}, src_overlap={src_overlap}"
            raise CaseLineError(f"{self.name}: {given}: expected nf from 1 to 16, perm1 0 or 1, src_overlap 0 to 2")
        if nf > 1 and self.name != "ADD":
            raise CaseLineError(f"nf={nf}: only ADD is fused with itself")
        if src_overlap and (nf > 1 or perm1 or b_kind != kind):
            raise PlanError(f"src_overlap={src_overlap}: only two operands of one type that lie in order overlap here")

        def make(rng: np.random.Generator) -> Problem:
            y = Tensor("y", kind, big)
            if src_overlap:
                start = prod(big) // (src_overlap + 1)
                both = Tensor("ab", kind, (start + max(prod(big), prod(small)),), "input")
                views = {i: View(at, s, View.whole(s).strides) for i, (s, at) in enumerate(((big, 0), (small, start)))}
                node = Node(self.name, (both, both), (y,), {"views": views})
                return Problem(node, {"ab": rounded_to(kind, rng.uniform(0.5, 1.5, both.shape))})
            a = Tensor("a", kind, big, "input")
            in_memory = (*small[:2], small[3], small[2]) if perm1 else small
            bs = tuple(Tensor(f"b{i}" if i else "b", b_kind, in_memory, "input") for i in range(nf))
            views = {1 + i: permuted(in_memory, (1, 0, 2, 3)) for i in range(nf)} if perm1 else {}
            values = {"a": rounded_to(kind, rng.uniform(-1, 1, big))}
            values |= {b.name: rounded_to(b_kind, rng.uniform(0.5, 1.5, in_memory)) for b in bs}
            return Problem(Node(self.name, (a, *bs), (y,), {"views": views} if views else {}), values)

        shown = {"type": type_word(kind), "ne": ne_of(small), "nr": ne_of(times), "nf": nf, "perm1": perm1, "src_overlap": src_overlap}
        shown |= {"type_b": type_word(b_kind)} if b_kind != kind else {}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        exact = Tolerance(1e-13, 1e-6, "one f32 operation: 2^-24, a division 2.5 ulp")
        if len(node.inputs) > 2:
            exact = Tolerance(1e-12, 1e-5, "up to 16 f32 additions")
        return stored_tolerance(exact, node.outputs[0].type)


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


def xielu(x: Array, alpha_n: float, alpha_p: float) -> Array:
    """XIELU with beta 0.5 and eps 1e-7; both alphas go through softplus, and beta is added to the one below zero."""
    positive, negative = np.logaddexp(0.0, alpha_p), 0.5 + np.logaddexp(0.0, alpha_n)
    return np.asarray(np.where(x > 0, positive * x * x, (np.expm1(np.minimum(x, 1e-7)) - x) * negative) + 0.5 * x)


UNARY: Mapping[str, Function] = {
    "SCALE": Function(
        "scale",
        lambda x, scale, bias: x * scale + bias,
        params=(("scale", 0.625), ("bias", -1.5)),
        others=((2.0, 0.0), (2.0, 1.0), (0.0, -1.0), (-1e-3, 0.0)),
        cost={"fmul": 1, "fadd": 1},
    ),
    "CLAMP": Function("clamp_to", np.clip, params=(("min", -0.5), ("max", 1.25)), others=((-0.25, 0.25), (0.0, 4.0), (1.0, 1.0))),
    "LEAKY_RELU": Function(
        "leaky_relu",
        lambda x, slope: np.maximum(x, 0.0) + slope * np.minimum(x, 0.0),
        params=(("negative_slope", 0.125),),
        others=((0.0,), (1.0,), (-0.5,)),
        cost={"fmul": 1},
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
    "ROUND": Function("round_away", lambda x: np.copysign(np.floor(np.abs(x)) + (np.abs(x) - np.floor(np.abs(x)) >= 0.5), x)),
    "TRUNC": Function("trunc", np.trunc),
    "EXPM1": Function("expm1_exact", np.expm1),
    "SIN": Function("sine", np.sin, (-6.5, 6.5)),
    "COS": Function("cosine", np.cos, (-6.5, 6.5)),
    "XIELU": Function("xielu", xielu, params=(("alpha_n", 4.0), ("alpha_p", 20.0))),
}
"""Ops of one operand."""

WITH_VIEWS = frozenset(UNARY) - {"SCALE", "CLAMP", "LEAKY_RELU", "SQR", "SQRT", "LOG", "SIN", "COS", "XIELU"}
"""Those that ggml also asks of a view of x."""

SIZES: Mapping[str, str] = {name: "ne_a" for name in (*WITH_VIEWS, "LEAKY_RELU")}
"""What ggml calls the sizes, where it is not ne."""

EITHER = frozenset({"FLOOR", "CEIL", "ROUND", "TRUNC"})
"""Those of which ggml has cases with `ne`, too, and then no view."""


def _last_keys(name: str, sizes: str) -> tuple[str, ...]:
    """Keys behind the function's parameters."""
    if name in WITH_VIEWS and not (name in EITHER and sizes == "ne"):
        return ("v",)
    return ("inplace",) if name == "SCALE" else ()


BACK: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "SILU": ("SILU_BACK", {}),
    "GELU": ("GELU_BACK", {}),
    "GELU_ERF": ("GELU_BACK", {"form": "gelu_erf"}),
    "GELU_QUICK": ("GELU_BACK", {"form": "gelu_quick"}),
}
"""Of functions the op that has their derivative, and its params."""


class Unary(Op):
    """An op of UNARY: x -> value by value."""

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        x = node.inputs[0]
        if self.name == "SCALE":
            return [tape.emit("SCALE", x, (dy,), scale=node.params["scale"], bias=0.0)]
        if self.name == "TANH":  # dy (1 - y^2)
            y = node.outputs[0]
            part = tape.emit("MUL", x, (tape.emit("MUL", x, (dy, y)), y))
            return [tape.emit("SUB", x, (dy, part))]
        if self.name not in BACK:
            return super().backward(node, dy, tape)
        op, params = BACK[self.name]
        return [tape.emit(op, x, (dy, x), **params)]

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
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        if x.elements != y.elements:
            raise PlanError(f"[{self.name}] {node.name}: output {y} has other elements than {x}")
        values = values_of(x, ctx)
        width = 4 if values % 4 == 0 else 1
        elements = x.elements // width
        choice = ctx.tuning.pick("elementwise", elements=values)
        defines: dict[str, str | int] = {"FUNCTION": UNARY[self.name].function, "WIDTH": width}
        return [
            by_threads(
                node,
                ctx,
                "elementwise/unary.comp",
                (Arg(x), Arg(y, "w")),
                (elements, *[*self._values(node.params), 0.0, 0.0][:2]),
                elements,
                defines,
                choice=choice,
                needed=values // width,
                how=f" of {width} values",
                flops=4 * x.elements,
                spins_on=[x] if y.name != x.name else None,
            )
        ]

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (5, 7, 11)):
            yield self._of_shape(shape)
        if self.name in ("SILU", "SQR"):
            for shape in ((1, 2048), (5, 7, 11)):
                yield self._of_shape(shape).where(sync="sentinel")
            yield self._of_shape((3, 5, 7, 10), type="bf16")
            yield self._of_shape((3, 5, 7, 11), type="f16", **({"v": True} if self.name in WITH_VIEWS else {}))

    def full_cases(self) -> Iterator[Case]:
        for shape in ((1,), (3,), (1, 33), (7, 1), (1, 4096), (128, 2, 2, 2), (5, 7, 11, 13), (2, 14336), (3, 70001)):
            yield self._of_shape(shape)
        function = UNARY[self.name]
        for some, values in product(((10, 10), (5, 7, 11, 13)), function.others):
            given: dict[str, Any] = {name: value for (name, _), value in zip(function.params, values, strict=True)}
            yield self._of_shape(some, **given)
        for type in FLOATS:
            yield self._of_shape((2, 2, 2, 128), type=type.lower())
            if self.name in WITH_VIEWS:
                yield self._of_shape((2, 2, 2, 128), type=type.lower(), v=True)

    def _of_shape(self, shape: Shape, **given: Any) -> Case:
        return self.case({SIZES.get(self.name, "ne"): ne_of(shape), **given})

    def case(self, params: Mapping[str, Any]) -> Case:
        """Parameters are `type`, sizes `ne_a` or `ne`, `v` or `inplace` where ggml has them, and those of the function."""

        def with_ne(*, type: str = "f32", ne: Shape, v: bool = False, inplace: bool = False, seed: int = 4, **given: float) -> Case:
            return self.build_case(type, ne, v=v, inplace=inplace, seed=seed, sizes="ne", **given)

        def with_ne_a(*, type: str = "f32", ne_a: Shape, v: bool = False, seed: int = 4, **given: float) -> Case:
            return self.build_case(type, ne_a, v=v, inplace=False, seed=seed, sizes="ne_a", **given)

        sizes = "ne" if "ne" in params and self.name in EITHER else SIZES.get(self.name, "ne")
        keys = ("type", sizes, *self.extra_keys, *_last_keys(self.name, sizes), "seed")
        build = with_ne if sizes == "ne" else with_ne_a
        example = lambda: self._of_shape((1, 4096)).line  # noqa: E731
        return call_with(build, params, op=self.name, extra_keys=self.extra_keys, only=keys, example=example)

    def build_case(
        self,
        type: str = "f32",
        ne: Shape = (10, 5, 4, 3),
        *,
        v: bool = False,
        inplace: bool = False,
        seed: int = 4,
        sizes: str = "",
        **given: float,
    ) -> Case:
        """Values uniform over the function's domain; v: x is a view of a tensor three times as large along its first two axes and
        others; inplace: the output is x itself; sizes: what the sizes are called; given: parameters in place of the usual ones."""
        sizes = sizes or SIZES.get(self.name, "ne")
        function, kind, shape = UNARY[self.name], one_of_types(type, FLOATS), shape_of(ne, sizes)
        if any(not isinstance(value, (int, float)) for value in given.values()):
            raise CaseLineError(f"{self.name}: {', '.join(f'{k}={value}' for k, value in given.items())}: expected numbers")
        params = dict(function.params) | {name: float(value) for name, value in given.items()}
        inner, view = view_in(shape, (4, 2, 5, 3)) if v else (shape, None)
        sized(inner)

        def make(rng: np.random.Generator) -> Problem:
            x = Tensor("x", kind, inner, "input")
            node = Node(self.name, (x,), (x if inplace else Tensor("y", kind, shape),), params | ({"views": {0: view}} if view else {}))
            return Problem(node, {"x": rounded_to(kind, rng.uniform(*function.domain, inner))})

        last = {"v": int(v), "inplace": int(inplace)}
        shown = {"type": type_word(kind), sizes: ne_of(shape), **params, **{k: last[k] for k in _last_keys(self.name, sizes)}}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        exact = Tolerance(1e-11, 1e-4, "f32; Vulkan allows exp 3 + 2|x| ulp and log 3 ulp, erf is good to 1.5e-7")
        return stored_tolerance(exact, node.outputs[0].type)


for _name, _function in UNARY.items():
    _own = {"name": _name, "extra_keys": tuple(name for name, _ in _function.params), "__doc__": f"{_name}(x).", "__module__": __name__}
    register(type(_name.title().replace("_", ""), (Unary,), _own))

"""Gated linear units (shaders/glu): SWIGLU, SIGMOID_GLU, REGLU, GEGLU, GEGLU_ERF, GEGLU_QUICK, SWIGLU_OAI, SWIGLU_CLAMP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import BARE, CaseLineError
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push, spread
from vkback.ops.family import declare
from vkback.ops.general import is_general, lower_general, rounded_to, stored_tolerance, view_in
from vkback.ops.ggml_words import FLOATS, ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, Tape, register
from vkback.ops.quantize import Q8_1_TOLERANCE
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

Params = Mapping[str, Any]

declare("glu", match={"k": "number", "n": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # of a very negative x, exp(-x) is inf, and 1 / inf the right 0
        e: Array = np.exp(-x)
    return 1.0 / (1.0 + e)


def gelu(x: Array) -> Array:
    """The tanh form."""
    inner: Array = np.tanh(math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x))
    return 0.5 * x * (1.0 + inner)


def gelu_erf(x: Array) -> Array:
    """The exact form, with the error function."""
    erf: Array = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0))
    return 0.5 * x * (1.0 + erf)


def gelu_quick(x: Array) -> Array:
    """The form with a logistic function."""
    return x * sigmoid(1.702 * x)


def swiglu(gate: Array, up: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is inf, and gate / inf is the right 0
        e: Array = np.exp(-gate)
    return gate / (1.0 + e) * up


def swiglu_oai(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    """min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (up within +-limit, plus 1)."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # as above
        e: Array = np.exp(-alpha * gate)
    return gate / (1.0 + e) * (up + 1.0)


SIGMOID_COST: Cost = {"fadd": 2, "fdiv": 1, "fexp": 1}
"""1 / (1 + exp(-x)); silu is as dear, x being divided in place of 1."""

TANH_COST: Cost = {"fmul": 1, "fadd": 2, "fdiv": 1, "fexp": 1}
"""1 - 2 / (1 + exp(2 x))"""

GELU_COST: Cost = {"fmul": 7, "fadd": 4, "fdiv": 1, "fexp": 1}
"""0.5 x (1 + tanh(a x (1 + b x^2)))"""

GELU_ERF_COST: Cost = {"fmul": 11, "fadd": 3, "fdiv": 1, "fexp": 1}
"""0.5 x (1 + erf(x / sqrt 2)), erf by a polynomial of fifth degree in 1 / (1 + p x), times exp(-x^2)."""

GELU_QUICK_COST: Cost = {"fmul": 1, **SIGMOID_COST}
"""x / (1 + exp(-a x))"""

GATES: Mapping[str, tuple[str, Cost]] = {
    "SWIGLU": ("SILU", SIGMOID_COST),
    "SIGMOID_GLU": ("SIGMOID", SIGMOID_COST),
    "REGLU": ("RELU", {}),
    "GEGLU": ("GELU", GELU_COST),
    "GEGLU_ERF": ("GELU_ERF", GELU_ERF_COST),
    "GEGLU_QUICK": ("GELU_QUICK", GELU_QUICK_COST),
    "SWIGLU_OAI": ("", {"fmul": 1, "fadd": 3, "fdiv": 1, "fexp": 1}),
    "SWIGLU_CLAMP": ("", SIGMOID_COST),
}
"""Of each op that of one operand for the gate, if there is one, and what a value of the gate costs; the product with up comes to it."""

GLU: Mapping[str, Callable[[Array, Array, Params], Array]] = {
    "SWIGLU": lambda gate, up, params: swiglu(gate, up),
    "SIGMOID_GLU": lambda gate, up, params: sigmoid(gate) * up,
    "REGLU": lambda gate, up, params: np.maximum(gate, 0.0) * up,
    "GEGLU": lambda gate, up, params: gelu(gate) * up,
    "GEGLU_ERF": lambda gate, up, params: gelu_erf(gate) * up,
    "GEGLU_QUICK": lambda gate, up, params: gelu_quick(gate) * up,
    "SWIGLU_OAI": lambda gate, up, params: swiglu_oai(gate, up, params["alpha"], params["limit"]),
    "SWIGLU_CLAMP": lambda gate, up, params: swiglu(np.minimum(gate, params["limit"]), np.clip(up, -params["limit"], params["limit"])),
}
"""References of the family; SWIGLU_OAI has params alpha and limit, SWIGLU_CLAMP limit."""

SWIGLU_OAI = {"alpha": 1.702, "limit": 7.0}
"""Its params as gpt-oss has them."""

PARAMS: Mapping[str, Mapping[str, float]] = {"SWIGLU_OAI": SWIGLU_OAI, "SWIGLU_CLAMP": {"limit": 7.0}}
"""Params of those that have some. Their gate and up are two tensors."""

TAKES = ("F32", "Q8_1")
"""Types of the kernel."""


BACK: Mapping[str, tuple[str, Params]] = {
    "SWIGLU": ("SWIGLU_BACK", {}),
    "GEGLU": ("GEGLU_BACK", {}),
    "GEGLU_ERF": ("GEGLU_BACK", {"form": "gelu_erf"}),
    "GEGLU_QUICK": ("GEGLU_BACK", {"form": "gelu_quick"}),
}
"""Of each op the one that has its derivatives, and its params."""


class Glu(Op):
    """An op of GLU. Inputs gate and up [..., k], or one [..., 2 k] whose rows hold the gate and then the up half (param swapped: up first);
    output F32 or Q8_1 [..., k]."""

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        if self.name not in BACK or len(node.inputs) != 2:
            return super().backward(node, dy, tape)
        (gate, up), (op, params) = node.inputs, BACK[self.name]
        grads = tape.like(gate), tape.like(up)
        tape.add(op, (dy, gate, up), grads, **params)
        return grads

    def elementary(self, node: Node, n_kv: int) -> list[Node]:
        """The gate's activation and a product, where gate and up are tensors of their own."""
        activation = GATES[self.name][0]
        y = node.outputs[0]
        if not activation or len(node.inputs) == 1 or y.type != "F32":
            return []
        gate, up = node.inputs
        # ffn_swiglu-0 is made from ffn_silu-0
        name = y.name.replace(self.name.lower(), activation.lower()) if self.name.lower() in y.name else f"{y.name} ({activation.lower()})"
        act = Tensor(name, "F32", gate.shape)
        return [Node(activation, (gate,), (act,)), Node("MUL", (act, up), (y,))]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return total(times(cost, node.outputs[0].elements) for cost in (GATES[self.name][1], {"fmul": 1}))

    def reference(self, inputs: Sequence[Array], params: Params) -> list[Array]:
        x = [np.asarray(i, np.float64) for i in inputs]
        if len(x) == 1:
            x = np.split(x[0], 2, axis=-1)
            if params.get("swapped"):
                x.reverse()
        return [GLU[self.name](x[0], x[1], params)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node, TAKES):
            return lower_general(self, node, ctx, TAKES)
        if self.name == "SWIGLU_CLAMP":
            return self._clamped(node, ctx)
        y = node.outputs[0]
        k, rows = y.shape[-1], prod(y.shape[:-1])
        split = len(node.inputs) == 2
        for t in node.inputs:
            if t.elements != y.elements * (1 if split else 2):
                want = "as many values" if split else "twice as many values"
                raise PlanError(f"[{self.name}] {node.name}: {t} does not fit the output {y}: expected {want}")
        gate, up = (node.inputs[0], node.inputs[-1])
        stride = k if split else 2 * k
        first, second = (k, 0) if node.params.get("swapped") and not split else (0, 0 if split else k)
        q8 = y.type == "Q8_1"
        quads = 8 * ceil_div(k, 32) if q8 else ceil_div(k, 4)
        choice = ctx.tuning.pick("glu", k=k, n=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], quads if ctx.exact else quads * rows)
        wg = max(wg, 8) if q8 else wg
        defines, subgroup = reduction(ctx.caps, wg, lanes=8 if q8 else 1)
        defines |= {"ACTIVATION": self.name.lower(), "OUT_Q8_1": int(q8), "WIDTH": 4 if k % 4 == 0 else 1}
        return [
            Dispatch(
                Variant.of("glu/glu.comp", defines, subgroup_size=subgroup),
                (Arg(gate), Arg(up), Arg(y, "w")),
                pack_push(rows, k, quads, stride, stride, first, second, *(float(node.params.get(p, 0.0)) for p in ("alpha", "limit"))),
                spread(ceil_div(quads * rows, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=sum(map(nbytes, (*node.inputs, y))),
                flops=8 * rows * k,
                waits=SpinWaits(part=(gate.name, up.name)) if gate.name != up.name else None,
            )
        ]

    def _clamped(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        """Gate and up within their limits as tensors of their own, then SWIGLU."""
        limit = float(node.params["limit"])
        before, inside = [], []
        for t, least in zip(node.inputs, (-np.inf, -limit), strict=True):
            inside.append(Tensor(f"{node.name}.{t.name}", "F32", t.shape))
            before += OPS["CLAMP"].lower(Node("CLAMP", (t,), (inside[-1],), {"min": least, "max": limit}), ctx)
        return before + OPS["SWIGLU"].lower(Node("SWIGLU", tuple(inside), node.outputs), ctx)

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (2, 2, 128), (7, 11, 5), (3, 37)):
            yield from self._glu_forms(shape)
        if self.name not in PARAMS:
            yield self._of_shape((2, 64), swapped=True)
        yield self._of_shape((1, 256), size=60.0)
        for shape in ((1, 2048), (3, 96), (2, 40)):
            yield self._of_shape(shape, out="q8_1")
        if self.name == "SIGMOID_GLU":
            for shape, out in (((1, 256), ""), ((3, 37), ""), ((2, 96), "q8_1")):
                yield self._of_shape(shape, split=True, out=out).where(sync="sentinel")
        if self.name == "SWIGLU":
            yield self._of_shape((2, 2, 2, 33), type="f16", v=True)
            yield self._of_shape((2, 2, 2, 33), type="bf16", split=True, v=True)

    def full_cases(self) -> Iterator[Case]:
        for shape in ((1,), (1, 33), (5, 7, 11, 13), (128, 2, 2, 2), (1, 14336), (3, 2880), (33, 768), (2, 96)):
            yield from self._glu_forms(shape)
            if self.name not in PARAMS:
                yield self._of_shape(shape, swapped=True)
            yield self._of_shape(shape, size=60.0)
            yield self._of_shape(shape, out="q8_1")
        for type, v in product(("f32", "f16", "bf16"), (False, True)):
            yield from self._glu_forms((2, 2, 2, 128), type=type, v=v)

    def perf_cases(self) -> Iterator[Case]:
        if self.name in ("SWIGLU", "GEGLU"):
            yield self._of_shape((1, 14336), split=True)
        if self.name == "SWIGLU":
            yield self._of_shape((1, 14336), split=True, out="q8_1")

    def _glu_forms(self, shape: Shape, **given: Any) -> Iterator[Case]:
        """Gate and up apart and, where there are no params, as halves of one tensor."""
        yield self._of_shape(shape, split=True, **given)
        if self.name not in PARAMS:
            yield self._of_shape(shape, **given)

    def _of_shape(self, shape: Shape, split: bool = False, **given: Any) -> Case:
        """By the shape of the output."""
        separate = split or self.name in PARAMS or "out" in given or "size" in given
        wide = shape if separate else (*shape[:-1], 2 * shape[-1])
        return self.build_case(ne_a=ne_of(wide), split=separate and self.name not in PARAMS, **given)

    def build_case(
        self,
        type: str = "f32",
        ne_a: Shape = (128, 2, 2, 2),
        v: bool = False,
        swapped: bool = False,
        split: bool = False,
        size: float = 3.0,
        out: str = "",
        seed: int = 5,
        **given: float,
    ) -> Case:
        """Values uniform in +-size: about where the activation is curved, or far beyond.

        ne_a   sizes of the input; with `split`, and where there are params, of gate and up each
        v      inputs are views of tensors three times as large along the first axis
        out    q8_1: a quantized output; given: alpha and limit
        """
        kind, wide = one_of_types(type, FLOATS), shape_of(ne_a, "ne_a")
        y_type = one_of_types(out, ("F32", "Q8_1"), "out") if out else kind
        separate = split or self.name in PARAMS
        if swapped and separate:
            raise CaseLineError(f"{self.name}: swapped=1: only halves of one tensor can be swapped")
        if split and self.name in PARAMS:
            raise CaseLineError(f"{self.name}: split: gate and up are always two tensors")
        if not separate and wide[-1] % 2:
            raise CaseLineError(f"{self.name}: ne_a=[{wide[-1]},...]: expected an even size, for gate and up")
        if out and (kind != "F32" or v):
            raise PlanError(f"[{self.name}] out={out} of type={type}, v={int(v)}: only plain F32 inputs are quantized")
        extra = {**PARAMS.get(self.name, {}), **{name: float(value) for name, value in given.items()}}
        inner, view = view_in(wide, (1, 1, 1, 3)) if v else (wide, None)
        shape = wide if separate else (*wide[:-1], wide[-1] // 2)

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(n, kind, sized(inner), "input") for n in (("gate", "up") if separate else ("x",)))
            params = extra | ({"swapped": True} if swapped else {}) | ({"views": dict.fromkeys(range(len(inputs)), view)} if view else {})
            node = Node(self.name, inputs, (Tensor("y", y_type, shape),), params)
            return Problem(node, {t.name: rounded_to(kind, rng.uniform(-size, size, t.shape)) for t in inputs})

        shown: dict[str, Any] = {"type": type_word(kind), "ne_a": ne_of(wide), "v": int(v)}
        shown |= extra if self.name in PARAMS else {"split": BARE} if split else {"swapped": int(swapped)}
        shown |= {"size": size} if size != 3.0 else {}
        shown |= {"out": type_word(y_type)} if out else {}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if node.outputs[0].type == "Q8_1":
            # The product of two values has wider tails than either: amax is up to 10 rms.
            return Tolerance(3e-4, 0.1, Q8_1_TOLERANCE.reason)
        exact = Tolerance(1e-11, 1e-4, "f32, exp within 3 + 2|x| ulp by Vulkan's rules, that is 2e-5 relative at the bound of 87")
        return stored_tolerance(exact, node.outputs[0].type)


for _name in GLU:
    _own: dict[str, Any] = {"name": _name, "__doc__": f"{_name}(gate, up).", "__module__": __name__}
    _own |= {"extra_keys": tuple(PARAMS.get(_name, ()))}
    register(type(_name.title().replace("_", ""), (Glu,), _own))

"""RMS_NORM, NORM, L2_NORM and the fusions around them (shaders/norm): a workgroup a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div
from vkback.ops.family import declare
from vkback.ops.general import is_general, lower_general, permuted, view_in
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, Tape, register
from vkback.ops.quantize import Q8_1_TOLERANCE
from vkback.ops.workgroup import workgroup_size

declare("norm", match={"dim": "number", "rows": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

TAKES = ("F32", "Q8_1")
"""Types of the kernels."""

MAX_KEPT = 8
"""Quads (4 values) of a row, and as many of the weight, that a thread keeps in registers: 64 registers. Longer rows are read twice."""

TOLERANCE = Tolerance(1e-11, 1e-4, "f32: the sum of squares and a handful of roundings, each 2^-24; 1/sqrt is allowed 3 ulp")


WIDTHS = (1, 2, 31, 32, 33, 64, 100, 511, 512, 1023, 1024, 1025, 2048, 2880, 4096, 5120, 8192, 14336, 16896)
"""Of the full set."""


OURS = ("scale", "out", "seed")
"""Keys of every member that ggml does not have."""


class Norm(Op):
    """All members of the family: inputs a, (b,) (w,) (bias,) (residual,); outputs (sum,) y."""

    add: ClassVar[bool] = False
    weight: ClassVar[bool] = False
    center: ClassVar[bool] = False
    bias: ClassVar[bool] = False
    residual: ClassVar[bool] = False
    grouped: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("type", "ne", "eps", *OURS)

    def groups(self, node: Node) -> int:
        """Rows of x that a row of y has."""
        return node.inputs[1].elements // node.inputs[0].shape[-1] if self.grouped else 1

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value its square and its product with the scale, of a row a division and a square root; what centers, subtracts and adds up
        before. Fused ones are the sum of their chain."""
        if self.unfused(node):
            return super().arithmetic(node, n_kv)
        x = node.inputs[0]
        per_value = {"fmul": 2, "fadd": 2} if self.center else {"fmul": 2}
        return total((times(per_value, x.elements), times({"fdiv": 1, "sqrt": 1}, x.elements // x.shape[-1])))

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """Of a norm with a weight (and, where it centers, a bias) or without."""
        if self.add or self.residual or self.name == "L2_NORM":
            return super().backward(node, dy, tape)
        kind, params = "NORM" if self.center else "RMS_NORM", {"eps": node.params["eps"]}
        x, *weights = node.inputs
        dx = tape.emit(f"{kind}_BACK", x, (dy, x, *weights[:1]), **params) if tape.wants(x) else None
        if not any(map(tape.wants, weights)):
            return [dx, *(None for _ in weights)]
        grads = [tape.like(w) for w in weights]
        tape.add(f"{kind}_WEIGHT_BACK", (dy, x), tuple(grads), **params)
        return [dx, *grads]

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        if self.add:
            x = x + inputs[1]
        centered = x - x.mean(axis=-1, keepdims=True) if self.center else x
        y = centered / np.sqrt(np.mean(centered * centered, axis=-1, keepdims=True) + params["eps"])
        rest = list(inputs[1 + self.add :])
        if self.weight:
            y = y * rest.pop(0)
        for added in rest:
            y = y + added
        return [x, y] if self.add else [y]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node, TAKES):
            return lower_general(self, node, ctx, TAKES)
        a, y = node.inputs[0], node.outputs[-1]
        dim, rows = a.shape[-1], prod(a.shape[:-1])
        groups = self.groups(node)
        for what, t in zip(("weight", "bias"), node.inputs[1 + self.add : 1 + self.add + self.weight + self.bias], strict=False):
            if t.shape != (groups * dim,):
                raise PlanError(f"[{self.name}] {node.name}: the {what} is {t}, expected F32[{groups * dim}] for rows of {a}")
        if self.residual and node.inputs[-1].elements != a.elements:
            raise PlanError(f"[{self.name}] {node.name}: {node.inputs[-1]} is added, expected as many values as {a} has")
        if y.type not in ("F32", "Q8_1"):
            raise PlanError(f"[{self.name}] {node.name}: output {y} must be F32 or Q8_1")
        q8 = y.type == "Q8_1"
        if groups > 1 and (y.shape[-1] != groups * dim or rows % groups or (q8 and dim % 32)):
            raise PlanError(
                f"[{self.name}] {node.name}: {a} to {y}, expected whole rows of {groups * dim}, of Q8_1 in groups of whole units"
            )
        units = ceil_div(dim, 32)
        quads = ceil_div(dim, 4)
        span = 8 * units if q8 else quads
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], span)
        # Eight lanes find the largest value of a unit of 32.
        wg = max(wg, 8) if q8 else wg
        rounds = ceil_div(span, wg)
        defines = {
            "ADD": int(self.add),
            "WEIGHT": int(self.weight),
            "CENTER": int(self.center),
            "BIAS": int(self.bias),
            "RESIDUAL": int(self.residual),
            "OUT_Q8_1": int(q8),
            "WIDTH": 4 if dim % 4 == 0 else 1,
            # Few rounds keep a row in registers; more of them would spill, so it is read again.
            "ROUNDS": rounds if rounds <= MAX_KEPT else 0,
            "GROUPS": groups,
        }
        # Of one row each workgroup reads all.
        made, older = (a.name,), tuple(t.name for t in (node.inputs[1:2] if self.add else node.inputs[-1:] if self.residual else ()))
        args = (*(Arg(t) for t in node.inputs), *(Arg(t, "rw" if self.add and t is node.outputs[0] else "w") for t in node.outputs))
        return [
            by_rows(
                node,
                ctx,
                "norm/norm.comp",
                args,
                (rows, dim, quads, rounds, units, float(node.params["eps"])),
                rows,
                wg,
                choice,
                defines,
                lanes=8 if q8 else 1,
                how=f", {rounds} rounds {'in registers' if rounds <= MAX_KEPT else 'read twice'}",
                flops=(3 + self.add + self.weight + self.bias + self.residual) * rows * dim,
                waits=None
                if y.name == a.name
                else SpinWaits(whole=made if rows == 1 else (), part=made if rows > 1 else (), also_part=older, arrives=rows),
            )
        ]

    def cases(self) -> Iterator[Case]:
        for dim in (1, 64, 511, 1025, 4096, 8192, 16896):
            yield self._of_shape((2 if dim < 8192 else 1, dim))
        yield self._of_shape((5, 3, 128), eps=1e-5)
        yield self._of_shape((2, 64), eps=4.0)
        yield self._of_shape((1, 512), scale=1e-3, eps=1e-12)
        yield self._of_shape((1, 512), scale=0.0)
        if self.weight:
            for shape in ((1, 32), (3, 2048), (1, 4096), (2, 16896), (1, 100), (2, 37)):
                yield self._of_shape(shape, out="q8_1")
        for shape in ((1, 4096), (3, 102)):
            yield self._of_shape(shape).where(sync="sentinel")
        if "v" in self.keys:
            yield self._of_shape((3, 5, 70), v=True)
            yield self._of_shape((3, 5, 64), inplace=True) if "inplace" in self.keys else self._of_shape((3, 5, 64), noncontig_rows=True)

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in product(WIDTHS, (1, 2, 5, 33)):
            if rows * dim <= 70000 and not (self.center and dim == 1):  # the variance of one value is nothing but rounding
                yield self._of_shape((rows, dim))
        for eps in (1e-12, 1e-5, 0.1, 10.0):
            yield self._of_shape((2, 3, 64), eps=eps)
        if self.weight:
            for dim, rows in product(WIDTHS[2:], (1, 2)):
                yield self._of_shape((rows, dim), out="q8_1")
        for layout, dim in product(self.keys, (33, 1025)):
            if layout in ("v", "noncontig_rows", "inplace"):
                yield self._of_shape((3, 4, 5, dim), **{layout: True})

    def _of_shape(self, shape: Shape, **given: Any) -> Case:
        return self.build_case(ne=ne_of(shape), **given)

    def build_case(
        self,
        type: str = "f32",
        ne: Shape = (64, 5, 4, 3),
        v: bool = False,
        eps: float = 1e-6,
        noncontig_rows: bool = False,
        inplace: bool = False,
        scale: float = 1.0,
        out: str = "f32",
        seed: int = 11,
    ) -> Case:
        """Values uniform in +-scale about 0.3 * scale, weights in 0.5..1.5.

        v               a is a view of a tensor twice as large along its inner axes
        noncontig_rows  a's rows lie as columns of its tensor
        inplace         the output is a itself
        """
        one_of_types(type, ("F32",))
        y_type, shape = one_of_types(out, TAKES, "out"), shape_of(ne)
        if y_type == "Q8_1" and not self.weight:
            raise PlanError(f"[{self.name}] out={out}: only norms with a weight are quantized")
        if v + noncontig_rows + inplace > 1:
            raise PlanError(f"[{self.name}] v={int(v)}, noncontig_rows={int(noncontig_rows)}, inplace={int(inplace)}: expected one of them")
        inner, view = view_in(shape, (1, 2, 2, 2)) if v else (shape, None)
        if noncontig_rows:
            inner, view = (*shape[:2], shape[3], shape[2]), permuted((*shape[:2], shape[3], shape[2]), (1, 0, 2, 3))
        sized(inner)

        def make(rng: np.random.Generator) -> Problem:
            dim = shape[-1]
            row = (*shape[:-2], shape[-2] * dim) if self.grouped else shape
            inputs = [Tensor("a", "F32", inner, "input")]
            if self.add:
                inputs.append(Tensor("b", "F32", shape, "input"))
            values: dict[str, Array] = {t.name: (scale * rng.uniform(-0.7, 1.3, t.shape)).astype(np.float32) for t in inputs}
            if self.weight:
                inputs.append(Tensor("w", "F32", row[-1:], "weight"))
                values["w"] = rng.uniform(0.5, 1.5, row[-1]).astype(np.float32)
            if self.bias:
                inputs.append(Tensor("bias", "F32", (dim,), "weight"))
                values["bias"] = rng.uniform(-1, 1, dim).astype(np.float32)
            if self.residual:
                inputs.append(Tensor("residual", "F32", shape, "input"))
                values["residual"] = rng.uniform(-1, 1, shape).astype(np.float32)
            outputs = ((Tensor("sum", "F32", shape),) if self.add else ()) + (inputs[0] if inplace else Tensor("y", y_type, row),)
            return Problem(Node(self.name, tuple(inputs), outputs, {"eps": eps} | ({"views": {0: view}} if view else {})), values)

        given: dict[str, Any] = {
            "type": type.lower(),
            "ne": ne_of(shape),
            "v": int(v),
            "eps": eps,
            "noncontig_rows": int(noncontig_rows),
            "inplace": int(inplace),
        }
        shown = {key: given[key] for key in self.keys if key in given}
        shown |= {"scale": scale} if scale != 1.0 else {}
        shown |= {"out": type_word(y_type)} if y_type != "F32" else {}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Q8_1_TOLERANCE if node.outputs[-1].type == "Q8_1" else TOLERANCE


def _sizes_of_models(op: Norm) -> Iterator[Case]:
    for rows in (1, 512):
        yield op.build_case(ne=(4096, rows))


def _normed(x: Tensor, w: Tensor, y: Tensor, params: Mapping[str, Any], *added: Tensor, norm: str = "RMS_NORM") -> list[Node]:
    """y = RMS_NORM(x) * w, or of another norm, and what is added to it, as plain nodes; y may be Q8_1."""
    steps = [(norm, ()), ("MUL", (w,)), *(("ADD", (t,)) for t in added), *([("QUANTIZE_Q8_1", ())] if y.type == "Q8_1" else [])]
    chain: list[Node] = []
    for i, (op, others) in enumerate(steps):
        out = y if i == len(steps) - 1 else Tensor(f"{y.name}.step{i}", "F32", y.shape)
        chain.append(Node(op, (x, *others), (out,), params if i == 0 else {}))
        x = out
    return chain


@register
class RmsNorm(Norm):
    """RMS_NORM(x [..., dim]; eps) -> x / sqrt(mean(x^2) + eps) over the last axis."""

    name = "RMS_NORM"
    formula = "rms_norm(x)"
    keys = ("type", "ne", "v", "eps", "inplace", *OURS)

    def perf_cases(self) -> Iterator[Case]:
        return _sizes_of_models(self)


@register
class LayerNorm(Norm):
    """NORM(x [..., dim]; eps) -> (x - mean) / sqrt(variance + eps) over the last axis."""

    name = "NORM"
    formula = "norm(x)"
    center = True
    keys = ("type", "ne", "v", "eps", "noncontig_rows", *OURS)


@register
class L2Norm(Norm):
    """L2_NORM(x [..., dim]; eps) -> x / max(sqrt(sum of x^2), eps) over the last axis."""

    name = "L2_NORM"
    keys = ("type", "ne", "eps", "v", "noncontig_rows", *OURS)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        length = np.maximum(np.sqrt(np.sum(x * x, axis=-1, keepdims=True)), params["eps"])
        return [np.divide(x, length, out=np.zeros_like(x), where=length > 0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        dim, rows = x.shape[-1], prod(x.shape[:-1])
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], dim)
        args, push = (Arg(x), Arg(y, "w")), (rows, dim, float(node.params["eps"]))
        return [by_rows(node, ctx, "norm/l2_norm.comp", args, push, rows, wg, choice, flops=3 * x.elements)]


@register
class RmsNormMul(Norm):
    """RMS_NORM_MUL(x [..., dim], w [dim]; eps) -> RMS_NORM(x) * w, F32 or Q8_1."""

    name = "RMS_NORM_MUL"
    weight = True

    def perf_cases(self) -> Iterator[Case]:
        return _sizes_of_models(self)

    def unfused(self, node: Node) -> list[Node]:
        (x, w), (y,) = node.inputs, node.outputs
        return _normed(x, w, y, node.params)


@register
class RmsNormMulGroups(Norm):
    """RMS_NORM_MUL_GROUPS(x [..., groups, dim], w [groups * dim]; eps) -> RMS_NORM(x) [..., groups * dim] * w, F32 or Q8_1."""

    name = "RMS_NORM_MUL_GROUPS"
    weight = True
    grouped = True

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, w = inputs
        (normed,) = super().reference((x, np.ones(x.shape[-1])), params)
        return [normed.reshape(-1, w.size) * w]

    def unfused(self, node: Node) -> list[Node]:
        (x, w), (y,) = node.inputs, node.outputs
        chain = _normed(x, w, y, node.params)
        rows = replace(chain[0].outputs[0], shape=x.shape)  # as norms read it; what follows reads rows of y
        return [replace(chain[0], outputs=(rows,)), *chain[1:]]

    def cases(self) -> Iterator[Case]:
        for shape, out in (((2, 64), "f32"), ((8, 640), "q8_1"), ((3, 8, 640), "q8_1"), ((5, 3, 33), "f32"), ((2, 4224), "q8_1")):
            yield self._of_shape(shape, out=out)
        for out in ("f32", "q8_1"):
            yield self._of_shape((8, 640), out=out).where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for dim, n, groups, out in product((32, 96, 1024, 2048, 16896), (1, 2, 17), (2, 5), ("f32", "q8_1")):
            yield self._of_shape((n, groups, dim), out=out, eps=1e-5)


@register
class LayerNormMulAdd(Norm):
    """NORM_MUL_ADD(x [..., dim], w, bias [dim]; eps) -> NORM(x) * w + bias, F32 or Q8_1."""

    name = "NORM_MUL_ADD"
    center = True
    weight = True
    bias = True

    def perf_cases(self) -> Iterator[Case]:
        return _sizes_of_models(self)

    def unfused(self, node: Node) -> list[Node]:
        (x, w, bias), (y,) = node.inputs, node.outputs
        return _normed(x, w, y, node.params, bias, norm="NORM")


@register
class RmsNormMulAdd(Norm):
    """RMS_NORM_MUL_ADD(x [..., dim], w [dim], residual [..., dim]; eps) -> RMS_NORM(x) * w + residual, F32 or Q8_1."""

    name = "RMS_NORM_MUL_ADD"
    weight = True
    residual = True

    def perf_cases(self) -> Iterator[Case]:
        return _sizes_of_models(self)

    def unfused(self, node: Node) -> list[Node]:
        (x, w, residual), (y,) = node.inputs, node.outputs
        return _normed(x, w, y, node.params, residual)


@register
class AddRmsNormMul(Norm):
    """ADD_RMS_NORM_MUL(a, b [..., dim], w [dim]; eps) -> (a + b F32, RMS_NORM(a + b) * w F32 or Q8_1)."""

    name = "ADD_RMS_NORM_MUL"
    add = True
    weight = True

    def perf_cases(self) -> Iterator[Case]:
        return _sizes_of_models(self)

    def unfused(self, node: Node) -> list[Node]:
        (a, b, w), (x, y) = node.inputs, node.outputs
        return [Node("ADD", (a, b), (x,)), *_normed(x, w, y, node.params)]

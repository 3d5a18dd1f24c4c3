"""Operands of any scalar type and any strides, for ops whose kernels take F32 (or I32) rows one after the other
(shaders/copy/general.comp).

A node may say in its param `views` which inputs are views: {index: View}, and may have inputs and outputs of any type of VALUE_BYTES. An
op's `lower` asks `is_general` first; `lower_general` copies such inputs into place, runs the op's own kernel, and converts its output. The
op's reference is given what the views show. No model needs any of it: what a model runs has kernels that take its operands as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Tolerance
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op
from vkback.ops.storage import VALUE_BYTES, nbytes
from vkback.ops.view import View

NUMBERS: Mapping[str, int] = {"F32": 0, "F16": 1, "BF16": 2, "I32": 3, "I16": 4, "I8": 5, "I64": 6}
"""Of types, in the shader."""

DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64, "I16": np.int16, "I8": np.int8}
"""How numpy calls types; it has none for BF16, whose values are float32 that BF16 holds exactly."""

INTEGERS = frozenset({"I32", "I64", "I16", "I8"})

F16_ROUNDING = Tolerance(1e-6, 1.6e-2, "stored as F16: at most 2^-10 of a value by Vulkan's rules, so NMSE 2^-20; sixteen times the rms")
BF16_ROUNDING = Tolerance(1.6e-5, 6.5e-2, "stored as BF16 to nearest: at most 2^-8 of a value, so NMSE 2^-16; sixteen times the rms")


def copy_dispatch(
    x: Tensor, y: Tensor, node: Node, ctx: LowerContext, *, source: View | None = None, target: View | None = None
) -> Dispatch:
    """One launch: the values of x, or of its view `source`, converted to y, or to its view `target`, whose other values stay."""
    for t in (x, y):
        if t.type not in NUMBERS or t.kind == "weight":
            raise PlanError(f"[{node.op}] {node.name}: {t}: expected one of {', '.join(NUMBERS)} that is no weight")
    for view, tensor in ((source, x), (target, y)):
        if view is not None:
            view.check(tensor, node.op)
    shape = source.shape if source else target.shape if target else x.shape
    source = (source or View.whole(shape)).four()
    into = target.four() if target else View.whole(shape).four()
    if source.elements != into.elements or (target is None and source.elements != y.elements):
        raise PlanError(f"[{node.op}] {node.name}: {x} to {y}: expected as many values on either side")
    each = VALUE_BYTES[y.type]
    threads = source.elements if target or each >= 4 else ceil_div(source.elements * each, 4)
    choice = ctx.tuning.pick("copy", elements=source.elements)
    defines = {"FROM_TYPE": NUMBERS[x.type], "SCATTER": int(target is not None), "TO_TYPE": NUMBERS[y.type]}
    return by_threads(
        node,
        ctx,
        "copy/general.comp",
        (Arg(x), Arg(y, "rw" if target else "w")),
        (*source.shape, *source.strides, *into.strides, source.offset, into.offset),
        threads,
        defines,
        choice=choice,
        moved=source.elements * VALUE_BYTES[x.type] + source.elements * each,
    )


def views_of(params: Mapping[str, Any]) -> Mapping[int, View]:
    """The inputs that are views."""
    found: Mapping[int, View] = params.get("views", {})
    return found


def is_general(node: Node, takes: Collection[str] = ("F32", "I32")) -> bool:
    """Whether a node has views, or operands of other types than its kernel takes."""
    tensors = (*node.inputs, *node.outputs)
    return bool(views_of(node.params)) or any(t.type not in takes and t.type in VALUE_BYTES and t.kind != "weight" for t in tensors)


def lower_general(op: Op, node: Node, ctx: LowerContext, takes: Collection[str] = ("F32", "I32")) -> list[Dispatch]:
    """Copies of what the op's kernel cannot take, the op on the copies, and conversions of what it makes. takes: types of its kernel."""
    views = views_of(node.params)

    def kernel_type(t: Tensor) -> str:
        if t.type in takes or t.kind == "weight":
            return t.type
        wanted = "I32" if t.type in INTEGERS else "F32"
        if wanted not in takes:
            raise PlanError(f"[{node.op}] {node.name}: {t}: expected a type of floats")
        return wanted

    before, inputs = [], []
    for i, t in enumerate(node.inputs):
        if i not in views and kernel_type(t) == t.type:
            inputs.append(t)
            continue
        if t.kind == "weight":
            raise PlanError(f"[{node.op}] {node.name}: {t}: a view of a weight is not supported here")
        view = views.get(i, View.whole(t.shape))
        plain = Tensor(f"{node.name}.in{i}", kernel_type(t), view.shape)
        before.append(copy_dispatch(t, plain, node, ctx, source=view))
        inputs.append(plain)
    outputs, after = [], []
    for t in node.outputs:
        if kernel_type(t) == t.type:
            outputs.append(t)
            continue
        outputs.append(dataclasses.replace(t, name=f"{t.name}.{kernel_type(t).lower()}", type=kernel_type(t), kind="node"))
        after.append(copy_dispatch(outputs[-1], t, node, ctx))
    params = {k: v for k, v in node.params.items() if k != "views"}
    return [*before, *op.lower(Node(node.op, tuple(inputs), tuple(outputs), params), ctx), *after]


def viewed(params: Mapping[str, Any], index: int, value: Array) -> Array:
    """An input's values as the op sees them."""
    view = views_of(params).get(index)
    return value if view is None else view.of(value)


def stored_tolerance(exact: Tolerance, type: str) -> Tolerance:
    """The tolerance of an output that is then stored in a type: both errors."""
    rounding = {"F16": F16_ROUNDING, "BF16": BF16_ROUNDING}.get(type)
    if rounding is None:
        return exact
    return Tolerance(exact.nmse + rounding.nmse, exact.worst + rounding.worst, f"{exact.reason}; {rounding.reason}")


def rounded_to(type: str, values: Array) -> Array:
    """Values as a type holds them: F32 and BF16 in float32 arrays, F16 and integers in their own."""
    if type == "BF16":
        return quants.decode("BF16", quants.encode("BF16", values.astype(np.float32).reshape(1, -1))).reshape(values.shape)
    return values.astype(DTYPES[type])


def view_in(shape: tuple[int, ...], factors: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    """A tensor larger by a factor along each axis, and the view of its first values of `shape`."""
    inner = tuple(n * f for n, f in zip(shape, factors, strict=True))
    return inner, View(0, shape, View.whole(inner).strides)


def bytes_moved(*tensors: Tensor) -> int:
    """Of tensors, each once."""
    return sum(map(nbytes, tensors))


def permuted(shape: tuple[int, ...], ggml_axes: tuple[int, ...]) -> View:
    """ggml_permute of a whole tensor of four axes: its axis i (fastest first) becomes axis ggml_axes[i] of the view."""
    strides = View.whole(shape).strides
    size, step = [0] * 4, [0] * 4
    for axis, to in enumerate(ggml_axes):
        size[3 - to], step[3 - to] = shape[3 - axis], strides[3 - axis]
    assert prod(size) == prod(shape)
    return View(0, tuple(size), tuple(step))


def random_values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of a type: numbers in -1..1, or any whole ones."""
    if kind == "I32":
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    if kind in INTEGERS:
        values: Array = rng.integers(np.iinfo(DTYPES[kind]).min, np.iinfo(DTYPES[kind]).max, shape, DTYPES[kind], endpoint=True)
        return values
    return rounded_to(kind, rng.uniform(-1, 1, shape))

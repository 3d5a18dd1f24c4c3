"""Ops that only move values (shaders/copy): CPY, CONT, REPEAT, CONCAT, PAD, PERMUTE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.base import (
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
    moves_values,
    nbytes,
    pack_push,
    register,
    shards,
    spread,
    weight_push,
)
from vkback.ops.code_books import decoder
from vkback.ops.mat_vec import QUANTS
from vkback.ops.rows import F16_TOLERANCE
from vkback.ops.view import ORDERS, TRANSPOSED, View, laid_out
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

declare("copy", match={"elements": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

EXACT = Tolerance(0.0, 0.0, "values are moved, not computed")
DECODED = Tolerance(1e-12, 1e-5, "a multiplication and a subtraction in f32 of numbers that a file's block holds exactly")


PAIRS = frozenset({("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16"), ("I32", "I32")})
"""Types that are copied from and to."""


TYPES = (("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16"), ("I32", "I32"))
SHAPES: tuple[Shape, ...] = (
    (2,), (1, 4096), (3, 5, 32), (5, 7, 11, 2), (128, 2, 2, 2), (7, 6), (1, 64, 1, 3), (2, 3, 1000), (33, 34), (4, 262144),
)  # fmt: skip
BOXES: tuple[Shape, ...] = ((2, 3, 4, 32), (6, 8, 10, 12), (3, 5, 7, 32), (10, 10, 10, 2))
"""Of the full set: types from and to, shapes of whole copies, and of copies in another order."""


class Convert(Op):
    """A copy. params: `view` (View of x), `to` (View of y, whose other values stay: y is then an input, too); default all values.

    x   F32 or F16 to F32 or F16; I32 to I32; a weight of any type to F32 or F16. F16 is written two values at a time.
    """

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = inputs[0]
        values = params["view"].of(np.ascontiguousarray(x)) if "view" in params else x
        values = values if values.dtype.kind == "i" else values.astype(np.float64)
        if "to" not in params:
            return [values]
        y = inputs[1].astype(values.dtype)
        part = params["to"].of(y)
        part[...] = values.reshape(part.shape)
        return [y]

    arithmetic = moves_values

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of x what the view shows; nothing of the tensor that is written."""
        if tensor.name != node.inputs[0].name:
            return 0
        view = node.params.get("view")
        return nbytes(tensor) * view.elements // tensor.elements if view else nbytes(tensor)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        source, target = node.params.get("view", View.whole(x.shape)), node.params.get("to", View.whole(y.shape))
        if source.elements != target.elements:
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected as many values on either side")
        source.check(x, self.name)
        target.check(y, self.name)
        whole = "view" not in node.params and "to" not in node.params
        if x.kind == "weight" and len(x.shape) > 1:
            return [self._decoded(node, ctx, source)]
        if (x.type, y.type) not in PAIRS:
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected F32 or F16 on either side, I32 on both, or a weight")
        if whole and x.elements % 2 == 0 and x.type != "I32":
            return [self._in_pairs(node, ctx)]
        return [self._boxed(node, ctx, source, target)]

    def _in_pairs(self, node: Node, ctx: LowerContext) -> Dispatch:
        x, y = node.inputs[0], node.outputs[0]
        pairs = x.elements // 2
        choice = ctx.tuning.pick("copy", elements=x.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], pairs)
        defines = (("FROM_F16", int(x.type == "F16")), ("TO_F16", int(y.type == "F16")), ("WG_SIZE", wg))
        return Dispatch(
            Variant("copy/convert.comp", defines),
            (Arg(x), Arg(y, "w")),
            pack_push(pairs),
            spread(ceil_div(pairs, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=nbytes(x) + nbytes(y),
        )

    def _boxed(self, node: Node, ctx: LowerContext, source: View, target: View) -> Dispatch:
        """Whichever side is whole takes the other's shape."""
        x, y = node.inputs[0], node.outputs[0]
        if "view" not in node.params:
            source = View.whole(target.shape)
        elif "to" not in node.params:
            target = View.whole(source.shape)
        elif source.shape != target.shape:
            raise PlanError(f"[{self.name}] {node.name}: from {source} to {target}: two views must have one shape")
        source, target = source.four(), target.four()
        if y.type == "F16":
            if source.elements % 2:
                raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: an odd number of F16 values is not supported")
            odd = any(s % 2 for s in (target.offset, target.shape[3], *target.strides[:3]))
            if odd or target.strides[3] != 1:
                raise PlanError(f"[{self.name}] {node.name}: {y}: F16 is written in pairs, expected rows of an even length, got {target}")
        return _box(
            node, ctx, x, y, source.shape, source.shape, source.strides, target.strides, x_offset=source.offset, y_offset=target.offset
        )

    def _decoded(self, node: Node, ctx: LowerContext, source: View) -> Dispatch:
        """A weight's rows, or some of them, from one of their units on."""
        x, y = node.inputs[0], node.outputs[0]
        columns = x.shape[-1]
        four = source.four()
        row0, column0 = divmod(source.offset, columns)
        parts = shards(x, ctx.caps)
        k = four.shape[3]
        problem = (
            f"it does not fit one binding, but takes {len(parts)}" if len(parts) > 1
            else f"weights become F32 or F16, not {y.type}" if y.type not in ("F32", "F16") or "to" in node.params
            else "an odd number of F16 values is not supported" if y.type == "F16" and k % 2
            else f"{source} is not made of whole rows from a multiple of 32 on"
            if four.strides[3] != 1 or any(s % columns for s in four.strides[:3]) or column0 % 32 or column0 + k > columns
            else ""
        )  # fmt: skip
        if problem:
            raise PlanError(f"[{self.name}] {node.name}: {x}: {problem}")
        threads = prod(four.shape[:3]) * ceil_div(k, 32)
        choice = ctx.tuning.pick("copy", elements=four.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], threads)
        defines = {"WG_SIZE": wg, "TO_F16": int(y.type == "F16"), "WIDTH": 4 if k % 4 == 0 else 1, **decoder(x.type, ctx.caps)}
        push = (*weight_push(x.type, parts[0].layout, columns), *four.shape[:3], *(s // columns for s in four.strides[:3]))
        return Dispatch(
            Variant("copy/decode.comp", tuple(sorted(defines.items()))),
            (Arg(x), Arg(y, "w")),
            pack_push(*push, row0, column0 // 32, k),
            spread(ceil_div(threads, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=prod(four.shape[:3]) * quants.row_bytes(x.type, columns) * k // columns + nbytes(y),
        )

    def cases(self) -> Iterator[Case]:
        for types in (("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16"), ("I32", "I32")):
            yield self.build_case((3, 5, 32), *types)
            yield self.build_case((3, 5, 32), *types, order=(1, 0, 2))
        yield self.build_case((3, 5, 7), "F32", "F32")
        yield self.build_case((6, 8, 10), "F32", "F16", order=(2, 1, 0))
        yield self.build_case((4, 6), "F16", "F32", to=(1, 0), gap=6)
        yield self.build_case((4, 6), "F32", "F16", order=(0, 1), to=(0, 1), gap=4)
        for quant in ("F32", "F16", "Q4_K", "Q8_0"):
            yield self.build_case((5, 256), quant, "F32", weight=True)
        yield self.build_case((2, 3, 256), "Q4_0", "F16", order=(1, 0, 2), gap=64, weight=True)

    def full_cases(self) -> Iterator[Case]:
        for shape, a, b in product(SHAPES, ("F32", "F16"), ("F32", "F16")):
            yield self.build_case(shape, a, b)
        for shape in ((1,), (3, 5, 7), (5, 7, 11, 13)):
            yield self.build_case(shape, "F32", "F32")
        for (a, b), shape, order in product(TYPES, BOXES, (*ORDERS, *TRANSPOSED)):
            yield self.build_case(shape, a, b, order=order)

    def build_case(
        self, ne: Shape, type_src: str, type_dst: str, order: Shape = (), to: Shape = (), gap: int = 0, weight: bool = False,
        seed: int = 29,
    ) -> Case:
        """order, gap: how the values lie in x (see `laid_out`); to: in y likewise, a tensor that holds values already."""
        x_shape, view = laid_out(ne, order, gap=gap if order else 0)
        y_shape, into = laid_out(ne, to, gap=gap if to else 0)
        params = {"view": view} if order else {}
        params |= {"to": into} if to else {}

        def make(rng: np.random.Generator) -> Problem:
            x = Tensor("x", type_src, x_shape, "weight" if weight else "input")
            y = Tensor("y", type_dst, y_shape, "state" if to else "node")
            blocks = quants.random_blocks(type_src, prod(x_shape[:-1]), x_shape[-1], rng) if weight else None
            values = {"x": some(type_src, x_shape, rng) if blocks is None else blocks}
            if to:
                values["y"] = some(type_dst, y_shape, rng)
            return Problem(Node(self.name, (x, y) if to else (x,), (y,), params), values)

        shown: dict[str, Any] = {"type_src": type_src, "type_dst": type_dst, "ne": ne}
        shown |= {"order": order} if order else {}
        shown |= {"to": to} if to else {}
        shown |= {"gap": gap} if gap else {}
        shown |= {"weight": 1} if weight else {}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        x, y = node.inputs[0], node.outputs[0]
        if y.type == "F16" and x.type != "F16":
            return F16_TOLERANCE
        return DECODED if x.kind == "weight" else EXACT


def some(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of a type: numbers in -1..1, or any whole ones."""
    if kind == "I32":
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    return rng.uniform(-1, 1, shape).astype(np.float16 if kind == "F16" else np.float32)


@register
class Cpy(Convert):
    """CPY(x); see Convert."""

    name = "CPY"
    formula = "x->y"
    peer_nmse = 1e-6

    def full_cases(self) -> Iterator[Case]:
        yield from super().full_cases()
        for shape in (*SHAPES, (1,), (3, 5, 7)):
            yield self.build_case(shape, "I32", "I32")
        for (a, b), shape, order in product(TYPES, BOXES, (*ORDERS, *TRANSPOSED)):
            yield self.build_case(shape, a, b, order=order, gap=6)
        for (a, b), shape, to in product(TYPES, ((3, 5, 32), (6, 8, 10)), ((0, 1, 2), (1, 0, 2))):
            yield self.build_case(shape, a, b, to=to, gap=4)
            yield self.build_case(shape, a, b, order=(0, 2, 1), to=to, gap=4)
        for quant, target in product(QUANTS, ("F32", "F16")):
            for shape in ((1, 256), (5, 768)):
                yield self.build_case(shape, quant, target, weight=True)
            yield self.build_case((2, 3, 256), quant, target, order=(1, 0, 2), gap=512, weight=True)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case((n, 4096), "F32", "F16")


@register
class Cont(Convert):
    """CONT(x); see Convert."""

    name = "CONT"
    formula = "cont(x)"


def _four(shape: Sequence[int]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    four = _four(shape)
    return tuple(prod(four[axis + 1 :]) for axis in range(4))


def _box(
    node: Node, ctx: LowerContext, x: Tensor, y: Tensor, box: Sequence[int], x_size: Sequence[int], x_stride: Sequence[int],
    y_stride: Sequence[int], *, x_offset: int = 0, y_offset: int = 0, fill: bool = False, part: str = "",
) -> Dispatch:
    """One launch of copy/box.comp, all sizes and strides of four axes in values."""
    x_next = x_stride[3]
    if y.type == "F16":  # a thread takes two values of the last axis
        box, x_size = (*box[:3], box[3] // 2), (*x_size[:3], x_size[3] // 2)
        x_stride, y_stride = (*x_stride[:3], 2 * x_next), (*y_stride[:3], 2)
    elements = prod(box)
    choice = ctx.tuning.pick("copy", elements=elements)
    wg = workgroup_size(ctx.caps, choice["wg_size"], elements)
    defines = (("FILL", int(fill)), ("FROM_F16", int(x.type == "F16")), ("TO_F16", int(y.type == "F16")), ("WG_SIZE", wg))
    return Dispatch(
        Variant("copy/box.comp", defines),
        (Arg(x), Arg(y, "w", part=part)),
        pack_push(*box, *x_size, *x_stride, *y_stride, x_offset, y_offset, x_next),
        spread(ceil_div(elements, wg)),
        node.op,
        node.name,
        f"{wg} threads: {choice.source}",
        nbytes=8 * elements,
    )


def by_x(shape: Shape) -> str:
    """A shape as one word: 3x5x7."""
    return "x".join(map(str, shape))


class Boxed(Op):
    """An op whose launches are boxes of F32 or I32 values of up to four axes."""

    arithmetic = moves_values

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y = node.outputs[0]
        for t in (*node.inputs, y):
            if t.type not in ("F32", "I32") or t.type != y.type or len(t.shape) > 4:
                raise PlanError(f"[{self.name}] {node.name}: {t}: expected F32 (or I32 everywhere) of at most four axes")
        shapes = [t.shape for t in node.inputs]
        try:
            want = self.reference([np.broadcast_to(np.float32(0), s) for s in shapes], {**node.params, "shape": y.shape})[0].shape
        except ValueError as error:
            raise PlanError(f"[{self.name}] {node.name}: inputs {shapes} do not fit: {error}") from error
        if want != y.shape:
            raise PlanError(f"[{self.name}] {node.name}: output {y}, expected shape {list(want)}")
        return self.boxes(node, ctx)

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        raise NotImplementedError

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT

    def boxed_case(self, ne: Sequence[str | int], out: Shape, type: str, seed: int, **params: Any) -> Case:
        """ne: the inputs' shapes, each as 3x5; params: of the node."""
        shapes = [tuple(map(int, str(s).split("x"))) for s in ne]

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(f"x{i}", type, s, "input") for i, s in enumerate(shapes))
            values = {t.name: some(type, t.shape, rng) for t in inputs}
            return Problem(Node(self.name, inputs, (Tensor("y", type, out),), params), values)

        shown = {"ne": tuple(ne), "out": out, **({} if type == "F32" else {"type": type})}
        return Case(self.name, {**shown, **params, "seed": seed}, make, seed)


@register
class Repeat(Boxed):
    """REPEAT(x; shape) -> x repeated along each axis up to `shape`, a multiple of its own."""

    name = "REPEAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, shape = inputs[0], params["shape"]
        times = [big // small for big, small in zip(_four(shape), _four(x.shape), strict=True)]
        return [np.tile(x.reshape(_four(x.shape)), times).reshape(shape)]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        return [_box(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(("5x7",), (10, 21), (10, 21))
        yield self.build_case(("5x7",), (10, 21), (10, 21), "I32")
        yield self.build_case(("3x1x4",), (2, 3, 5, 4), (2, 3, 5, 4))

    def full_cases(self) -> Iterator[Case]:
        repeats = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 3), (2, 2, 2, 2), (1, 1, 1, 5))
        smalls: tuple[Shape, ...] = ((5, 4, 3), (1, 33), (7,), (2, 3, 5, 10))
        for small, times in product(smalls, repeats):
            big = tuple(s * t for s, t in zip(small, times[4 - len(small) :], strict=True))
            for type in ("F32", "I32"):
                yield self.build_case((by_x(small),), big, big, type)

    def build_case(self, ne: tuple[str | int, ...], out: Shape, shape: Shape, type: str = "F32", seed: int = 31) -> Case:
        return self.boxed_case(ne, out, type, seed, shape=shape)


@register
class Concat(Boxed):
    """CONCAT(a, b, ...; axis) -> the inputs one after the other along an axis."""

    name = "CONCAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.concatenate(list(inputs), axis=params["axis"])]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, axis = node.outputs[0], node.params["axis"] % len(node.outputs[0].shape)
        stride = prod(y.shape[axis + 1 :])
        starts = np.cumsum([0, *(t.shape[axis] for t in node.inputs)])
        return [
            _box(
                node, ctx, x, y, _four(x.shape), _four(x.shape), _strides(x.shape), _strides(y.shape),
                y_offset=int(start) * stride, part=f"input {i}",
            )
            for i, (x, start) in enumerate(zip(node.inputs, starts, strict=False))
        ]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(("3x4x5", "3x2x5"), (3, 6, 5), 1)
        yield self.build_case(("3x4x5", "3x2x5"), (3, 6, 5), 1, "I32")
        yield self.build_case(("2x64", "2x33", "2x1"), (2, 98), -1)

    def full_cases(self) -> Iterator[Case]:
        bases: tuple[Shape, ...] = ((11, 12, 13, 14), (3, 64), (5,))
        for base, axis, other in product(bases, (0, 1, 2, 3), (1, 7, 12)):
            if axis < len(base):
                second = tuple(other if i == axis else s for i, s in enumerate(base))
                out = tuple(s + other if i == axis else s for i, s in enumerate(base))
                for type in ("F32", "I32"):
                    yield self.build_case((by_x(base), by_x(second)), out, axis, type)

    def build_case(self, ne: tuple[str | int, ...], out: Shape, axis: int, type: str = "F32", seed: int = 31) -> Case:
        return self.boxed_case(ne, out, type, seed, axis=axis)


@register
class Pad(Boxed):
    """PAD(x; shape) -> x with zeros behind it along each axis, up to `shape`."""

    name = "PAD"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = inputs[0]
        return [np.pad(x, [(0, big - small) for big, small in zip(params["shape"], x.shape, strict=True)])]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        return [_box(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape), fill=True)]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(("3x5",), (4, 9), (4, 9))

    def full_cases(self) -> Iterator[Case]:
        bases: tuple[Shape, ...] = ((5,), (3, 512), (2, 3, 33), (5, 7, 11, 13))
        for base, more in product(bases, ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 3, 1), (1, 2, 3, 4))):
            big = tuple(s + m for s, m in zip(base, more[4 - len(base) :], strict=True))
            yield self.build_case((by_x(base),), big, big)

    def build_case(self, ne: tuple[str | int, ...], out: Shape, shape: Shape, type: str = "F32", seed: int = 31) -> Case:
        return self.boxed_case(ne, out, type, seed, shape=shape)


@register
class Permute(Boxed):
    """PERMUTE(x; axes) -> numpy's transpose, as a tensor of its own."""

    name = "PERMUTE"
    formula = "permute(x)"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.transpose(inputs[0], params["axes"])]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        lead = 4 - len(x.shape)
        axes = [*range(lead), *(lead + a for a in node.params["axes"])]
        strides = _strides(x.shape)
        return [_box(node, ctx, x, y, _four(y.shape), _four(y.shape), [strides[a] for a in axes], _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(("3x5x7",), (5, 7, 3), (1, 2, 0))
        yield self.build_case(("2x3x4x32",), (2, 4, 3, 32), (0, 2, 1, 3))

    def full_cases(self) -> Iterator[Case]:
        four = ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1), (0, 1, 2, 3))
        orders: list[tuple[Shape, Shape]] = [
            *product(((2, 3, 4, 32), (5, 7, 11, 13), (1, 64, 3, 8)), four), *product(((33, 65), (1, 128), (512, 4)), ((1, 0), (0, 1))),
        ]  # fmt: skip
        for shape, axes in orders:
            yield self.build_case((by_x(shape),), tuple(shape[a] for a in axes), axes)

    def build_case(self, ne: tuple[str | int, ...], out: Shape, axes: Shape, type: str = "F32", seed: int = 31) -> Case:
        return self.boxed_case(ne, out, type, seed, axes=axes)

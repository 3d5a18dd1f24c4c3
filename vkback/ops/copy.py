"""Ops that only move values (shaders/copy): CPY, CONT, REPEAT, CONCAT, PAD, PERMUTE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

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
    Tolerance,
    ceil_div,
    declare,
    nbytes,
    pack_push,
    register,
    spread,
)
from vkback.ops.rows import F16_TOLERANCE
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

declare("copy", match={"elements": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

EXACT = Tolerance(0.0, 0.0, "values are moved, not computed")


class Convert(Op):
    """A copy to a tensor of F32 or F16; an F16 side must have an even number of values."""

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.asarray(inputs[0], np.float64)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        types = (x.type, y.type)
        if x.elements != y.elements or not set(types) <= {"F32", "F16"}:
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected F32 or F16 and as many values on either side")
        if x.elements % 2:
            if types == ("F32", "F32"):
                return [_box(node, ctx, x, y, (1, 1, 1, x.elements), (1, 1, 1, x.elements), (0, 0, 0, 1), (0, 0, 0, 1))]
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: an odd number of F16 values is not supported")
        pairs = x.elements // 2
        choice = ctx.tuning.pick("copy", elements=x.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], pairs)
        defines = (("FROM_F16", int(x.type == "F16")), ("TO_F16", int(y.type == "F16")), ("WG_SIZE", wg))
        return [
            Dispatch(
                Variant("copy/convert.comp", defines, (), None),
                (Arg(x), Arg(y, "w")),
                pack_push(pairs),
                spread(ceil_div(pairs, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=nbytes(x) + nbytes(y),
            )
        ]

    def cases(self) -> Iterator[Case]:
        for types in (("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16")):
            yield self.case((3, 5, 32), *types)
        yield self.case((3, 5, 7), "F32", "F32")

    def case(self, shape: tuple[int, ...], source: str, target: str, *, seed: int = 29) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            node = Node(self.name, (Tensor("x", source, shape, "input"),), (Tensor("y", target, shape),))
            return Problem(node, {"x": rng.uniform(-1, 1, shape).astype(np.float16 if source == "F16" else np.float32)})

        return Case(self.name, {"type_src": source, "type_dst": target, "ne": shape, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return F16_TOLERANCE if (node.inputs[0].type, node.outputs[0].type) == ("F32", "F16") else EXACT


for _name in ("CPY", "CONT"):
    register(type(_name.title(), (Convert,), {"name": _name, "__doc__": f"{_name}(x F32 or F16) -> F32 or F16.", "__module__": __name__}))


def _four(shape: Sequence[int]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    four = _four(shape)
    return tuple(prod(four[axis + 1 :]) for axis in range(4))


def _box(
    node: Node, ctx: LowerContext, x: Tensor, y: Tensor, box: Sequence[int], x_size: Sequence[int], x_stride: Sequence[int],
    y_stride: Sequence[int], *, y_offset: int = 0, fill: bool = False, part: str = "",
) -> Dispatch:
    """One launch of copy/box.comp, all sizes and strides of four axes."""
    elements = prod(box)
    choice = ctx.tuning.pick("copy", elements=elements)
    wg = workgroup_size(ctx.caps, choice["wg_size"], elements)
    return Dispatch(
        Variant("copy/box.comp", (("FILL", int(fill)), ("WG_SIZE", wg)), (), None),
        (Arg(x), Arg(y, "w", part=part)),
        pack_push(*box, *x_size, *x_stride, *y_stride, y_offset),
        spread(ceil_div(elements, wg)),
        node.op,
        node.name,
        f"{wg} threads: {choice.source}",
        nbytes=8 * elements,
    )


class Boxed(Op):
    """An op whose launches are boxes of F32 values of up to four axes."""

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y = node.outputs[0]
        for t in (*node.inputs, y):
            if t.type != "F32" or len(t.shape) > 4:
                raise PlanError(f"[{self.name}] {node.name}: {t}: expected F32 of at most four axes")
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

    def case(self, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], *, seed: int = 31, **params: Any) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(f"x{i}", "F32", s, "input") for i, s in enumerate(shapes))
            values = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in inputs}
            return Problem(Node(self.name, inputs, (Tensor("y", "F32", out),), params), values)

        return Case(self.name, {"ne": tuple("x".join(map(str, s)) for s in shapes), "out": out, **params, "seed": seed}, make, seed)


@register
class Repeat(Boxed):
    """REPEAT(x; shape) -> x repeated along each axis up to `shape`, a multiple of its own."""

    name = "REPEAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, shape = np.asarray(inputs[0], np.float64), params["shape"]
        times = [big // small for big, small in zip(_four(shape), _four(x.shape), strict=True)]
        return [np.tile(x.reshape(_four(x.shape)), times).reshape(shape)]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        return [_box(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        yield self.case([(5, 7)], (10, 21), shape=(10, 21))
        yield self.case([(3, 1, 4)], (2, 3, 5, 4), shape=(2, 3, 5, 4))


@register
class Concat(Boxed):
    """CONCAT(a, b, ...; axis) -> the inputs one after the other along an axis."""

    name = "CONCAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.concatenate([np.asarray(i, np.float64) for i in inputs], axis=params["axis"])]

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
        yield self.case([(3, 4, 5), (3, 2, 5)], (3, 6, 5), axis=1)
        yield self.case([(2, 64), (2, 33), (2, 1)], (2, 98), axis=-1)


@register
class Pad(Boxed):
    """PAD(x; shape) -> x with zeros behind it along each axis, up to `shape`."""

    name = "PAD"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        return [np.pad(x, [(0, big - small) for big, small in zip(params["shape"], x.shape, strict=True)])]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        return [_box(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape), fill=True)]

    def cases(self) -> Iterator[Case]:
        yield self.case([(3, 5)], (4, 9), shape=(4, 9))


@register
class Permute(Boxed):
    """PERMUTE(x; axes) -> numpy's transpose, as a tensor of its own."""

    name = "PERMUTE"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.transpose(np.asarray(inputs[0], np.float64), params["axes"])]

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        lead = 4 - len(x.shape)
        axes = [*range(lead), *(lead + a for a in node.params["axes"])]
        strides = _strides(x.shape)
        return [_box(node, ctx, x, y, _four(y.shape), _four(y.shape), [strides[a] for a in axes], _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        yield self.case([(3, 5, 7)], (5, 7, 3), axes=(1, 2, 0))
        yield self.case([(2, 3, 4, 32)], (2, 4, 3, 32), axes=(0, 2, 1, 3))

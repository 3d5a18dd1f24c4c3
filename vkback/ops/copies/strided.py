"""Ops that are strided copies (shaders/copy/box.comp): REPEAT, CONCAT, PAD, PERMUTE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.family import declare
from vkback.ops.general import copy_dispatch, is_general, lower_general, permuted, random_values, view_in, views_of
from vkback.ops.ggml_words import Four, ne_of, one_of_types, shape_of, sized, tensor_type, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.storage import VALUE_BYTES
from vkback.ops.view import View

declare("copy", match={"elements": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

EXACT = Tolerance(0.0, 0.0, "values are moved, not computed")


def _four(shape: Sequence[int]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    four = _four(shape)
    return tuple(prod(four[axis + 1 :]) for axis in range(4))


def strided_copy(
    node: Node,
    ctx: LowerContext,
    x: Tensor,
    y: Tensor,
    extent: Sequence[int],
    x_size: Sequence[int],
    x_stride: Sequence[int],
    y_stride: Sequence[int],
    *,
    x_offset: int = 0,
    y_offset: int = 0,
    fill: bool = False,
    part: str = "",
) -> Dispatch:
    """One launch of copy/box.comp, all sizes and strides of four axes in values."""
    x_next = x_stride[3]
    if y.type == "F16":  # a thread takes two values of the last axis
        extent, x_size = (*extent[:3], extent[3] // 2), (*x_size[:3], x_size[3] // 2)
        x_stride, y_stride = (*x_stride[:3], 2 * x_next), (*y_stride[:3], 2)
    elements = prod(extent)
    choice = ctx.tuning.pick("copy", elements=elements)
    defines = {"FILL": int(fill), "FROM_F16": int(x.type == "F16"), "TO_F16": int(y.type == "F16")}
    return by_threads(
        node,
        ctx,
        "copy/box.comp",
        (Arg(x), Arg(y, "w", part=part)),
        (*extent, *x_size, *x_stride, *y_stride, x_offset, y_offset, x_next),
        elements,
        defines,
        choice=choice,
        moved=8 * elements,
        spins_on=[x] if x.type == y.type == "F32" and x.name != y.name and not fill else None,
    )


def by_x(shape: Shape) -> str:
    """A shape as one word: 3x5x7."""
    return "x".join(map(str, shape))


class StridedCopies(Op):
    """An op whose launches are strided copies of F32 or I32 values of up to four axes."""

    arithmetic = moves_values

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y = node.outputs[0]
        if is_general(node):
            return lower_general(self, node, ctx)
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
        return self.launches(node, ctx)

    def launches(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        raise NotImplementedError

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return EXACT

    def strided_case(self, ne: Sequence[str | int], out: Shape, type: str, seed: int, **params: Any) -> Case:
        """ne: the inputs' shapes, each as 3x5; params: of the node."""
        shapes = [tuple(map(int, str(s).split("x"))) for s in ne]

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(f"x{i}", type, s, "input") for i, s in enumerate(shapes))
            values = {t.name: random_values(type, t.shape, rng) for t in inputs}
            return Problem(Node(self.name, inputs, (Tensor("y", type, out),), params), values)

        shown = {"ne": tuple(ne), "out": out, **({} if type == "F32" else {"type": type})}
        return Case(self.name, {**shown, **params, "seed": seed}, make, seed)


@register
class Repeat(StridedCopies):
    """REPEAT(x; shape) -> x repeated along each axis up to `shape`, a multiple of its own."""

    name = "REPEAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, shape = inputs[0], params["shape"]
        times = [big // small for big, small in zip(_four(shape), _four(x.shape), strict=True)]
        return [np.tile(x.reshape(_four(x.shape)), times).reshape(shape)]

    def launches(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        return [strided_copy(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        for type, ne, nr in (
            ("f32", (21, 10), (1, 2, 1, 1)),
            ("i32", (7, 5), (3, 2, 1, 1)),
            ("f32", (4, 1, 3), (1, 5, 1, 2)),
            ("i16", (7, 5, 2), (2, 1, 1, 2)),
            ("bf16", (10, 5), (2, 1, 2, 1)),
        ):
            yield self.build_case(type, ne, nr)

    def full_cases(self) -> Iterator[Case]:
        repeats: tuple[Four, ...] = ((1, 1, 1, 1), (1, 1, 1, 2), (3, 1, 2, 1), (2, 2, 2, 2), (5, 1, 1, 1))
        for ne, nr, type in product(((3, 4, 5), (33, 1), (7,), (10, 5, 3, 2)), repeats, ("f32", "i32", "f16", "i16")):
            yield self.build_case(type, ne, nr)

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), nr: Four = (2, 2, 2, 2), seed: int = 31) -> Case:
        kind, small, times = one_of_types(type, ("F32", "F16", "BF16", "I32", "I16", "I8")), shape_of(ne), shape_of(nr, "nr")
        big = sized(tuple(n * t for n, t in zip(small, times, strict=True)))

        def make(rng: np.random.Generator) -> Problem:
            node = Node("REPEAT", (Tensor("x", kind, small, "input"),), (Tensor("y", kind, big),), {"shape": big})
            return Problem(node, {"x": random_values(kind, small, rng)})

        return Case("REPEAT", {"type": type_word(kind), "ne": ne_of(small), "nr": ne_of(times), "seed": seed}, make, seed)


@register
class Concat(StridedCopies):
    """CONCAT(a, b, ...; axis) -> the inputs one after the other along an axis."""

    name = "CONCAT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.concatenate(list(inputs), axis=params["axis"])]

    def launches(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, axis = node.outputs[0], node.params["axis"] % len(node.outputs[0].shape)
        stride = prod(y.shape[axis + 1 :])
        starts = np.cumsum([0, *(t.shape[axis] for t in node.inputs)])
        return [
            strided_copy(
                node,
                ctx,
                x,
                y,
                _four(x.shape),
                _four(x.shape),
                _strides(x.shape),
                _strides(y.shape),
                y_offset=int(start) * stride,
                part=f"input {i}",
            )
            for i, (x, start) in enumerate(zip(node.inputs, starts, strict=False))
        ]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return self._lower_strided(node, ctx) if is_general(node) else super().lower(node, ctx)

    def _lower_strided(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        """Inputs of any type and any strides, each copied to its offset."""
        y, axis, start = node.outputs[0], node.params["axis"], 0
        strides, dispatches = View.whole(y.shape).strides, []
        for i, t in enumerate(node.inputs):
            source = views_of(node.params).get(i, View.whole(t.shape))
            dispatches.append(copy_dispatch(t, y, node, ctx, source=source, target=View(start * strides[axis], source.shape, strides)))
            start += source.shape[axis]
        return dispatches

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", (5, 4, 3), 2, 1)
        yield self.build_case("i32", (5, 4, 3), 2, 1)
        yield self.build_case("f32", (64, 2), 33, 0)
        yield self.build_case("f32", (64, 2), 33, 0).where(sync="sentinel")
        yield self.build_case("i8", (5, 3, 2), 2, 0, v=3)
        yield self.build_case("i64", (5, 3, 2), 2, 1, v=1)
        yield self.build_case("q4_0", (64, 3, 2), 32, 0)

    def full_cases(self) -> Iterator[Case]:
        for (ne, dim), other in product((((14, 13, 12, 11), 0), ((14, 13, 12, 11), 3), ((64, 3), 0), ((64, 3), 1), ((5,), 0)), (1, 7, 12)):
            for type, v in product(("f32", "i32", "bf16", "i16", "i8", "i64"), (0, 1, 2)):
                yield self.build_case(type, ne, other, dim, v)
        for type in ("q4_0", "q4_1", "q5_0", "q8_0"):
            yield self.build_case(type, (64, 3, 2), 32, 0, v=4)
            yield self.build_case(type, (64, 3, 2), 5, 1, v=8)

    def build_case(self, type: str = "f32", ne_a: Shape = (10, 5, 5, 5), ne_b_d: int = 5, dim: int = 2, v: int = 0, seed: int = 31) -> Case:
        """b of sizes ne_a but along `dim`, where it has ne_b_d. v: bits 1 and 4 make a a view of a larger tensor, 1 of one with longer
        rows, 2 and 8 likewise b. Of a quantized type blocks are moved as the file has them."""
        kind, a_shape = tensor_type(type), shape_of(ne_a, "ne_a")
        if not 0 <= dim <= 3 or not 0 <= v <= 15 or ne_b_d < 1:
            raise CaseLineError(f"CONCAT: dim={dim}, v={v}, ne_b_d={ne_b_d}: expected dim from 0 to 3, v from 0 to 15, ne_b_d from 1")
        b_shape = tuple(ne_b_d if axis == 3 - dim else n for axis, n in enumerate(a_shape))
        stored, shapes = kind, [a_shape, b_shape]
        if kind not in VALUE_BYTES:
            stored = "I8"
            try:
                shapes = [(*s[:3], quants.row_bytes(kind, s[3])) for s in shapes]
            except quants.QuantShapeError as e:
                raise CaseLineError(f"CONCAT: {e}") from e
        larger = [(1, 2 << 2 * (v >> i + 2 & 1), 2, 1 + (v >> i & 1)) if v & (5, 10)[i] else (1, 1, 1, 1) for i in range(2)]
        inner = [view_in(s, times) for s, times in zip(shapes, larger, strict=True)]
        for big, _ in inner:
            sized(big)
        views = {i: view for i, (_, view) in enumerate(inner) if v & (5, 10)[i]}
        out = tuple(shapes[0][i] + shapes[1][i] if i == 3 - dim else n for i, n in enumerate(shapes[0]))

        def make(rng: np.random.Generator) -> Problem:
            tensors = tuple(Tensor(name, stored, big, "input") for name, (big, _) in zip("ab", inner, strict=True))
            params = {"axis": 3 - dim} | ({"views": views} if views else {})
            values = {t.name: random_values(stored, t.shape, rng) for t in tensors}
            return Problem(Node("CONCAT", tensors, (Tensor("y", stored, out),), params), values)

        shown = {"type": type_word(kind), "ne_a": ne_of(a_shape), "ne_b_d": ne_b_d, "dim": dim, "v": v, "seed": seed}
        return Case("CONCAT", shown, make, seed)


@register
class Pad(StridedCopies):
    """PAD(x; shape, before, circular) -> x with zeros (of a circular one with the other end's values) before and behind it along each axis,
    up to `shape`. Default is nothing before it."""

    name = "PAD"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = inputs[0]
        before = params.get("before", (0,) * x.ndim)
        if not params.get("circular"):
            return [np.pad(x, [(b, big - small - b) for big, small, b in zip(params["shape"], x.shape, before, strict=True)])]
        for axis, (big, b) in enumerate(zip(params["shape"], before, strict=True)):
            x = np.take(x, (np.arange(big) - b) % x.shape[axis], axis=axis)
        return [x]

    def launches(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if "before" in node.params or node.params.get("circular"):
            return [self._around(node, ctx)]
        return [strided_copy(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape), fill=True)]

    def _around(self, node: Node, ctx: LowerContext) -> Dispatch:
        x, y = node.inputs[0], node.outputs[0]
        before = (*(0,) * (4 - len(x.shape)), *node.params.get("before", (0,) * len(x.shape)))
        choice = ctx.tuning.pick("copy", elements=y.elements)
        return by_threads(
            node,
            ctx,
            "copy/pad.comp",
            (Arg(x), Arg(y, "w")),
            (*_four(y.shape), *_four(x.shape), *_strides(x.shape), *before, 0),
            y.elements,
            {"CIRCULAR": int(bool(node.params.get("circular")))},
            choice=choice,
        )

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne_a=(5, 3), pad_0=4, pad_1=1)
        yield self.build_case(ne_a=(5, 3, 2, 2), lp0=1, rp0=2, lp1=3, lp2=1, rp3=1)
        yield self.build_case(ne_a=(5, 3, 2, 2), lp0=1, rp0=2, lp1=3, lp2=1, rp3=1, circular=True, tfrm=1)

    def full_cases(self) -> Iterator[Case]:
        for ne, (p0, p1) in product(((5,), (512, 3), (33, 3, 2), (13, 11, 7, 5)), ((0, 0), (1, 0), (0, 3), (4, 3))):
            yield self.build_case(ne_a=ne, pad_0=p0, pad_1=p1)
            for tfrm, circular in product((0, 1, 2), (False, True)):
                yield self.build_case(ne_a=ne, lp0=p0, rp0=2, lp1=p1, rp1=1, rp2=1, lp3=1, tfrm=tfrm, circular=circular)

    def build_case(
        self,
        type: str = "f32",
        ne_a: Shape = (512, 512, 3, 1),
        pad_0: int | None = None,
        pad_1: int | None = None,
        lp0: int | None = None,
        rp0: int | None = None,
        lp1: int | None = None,
        rp1: int | None = None,
        lp2: int | None = None,
        rp2: int | None = None,
        lp3: int | None = None,
        rp3: int | None = None,
        tfrm: int = 0,
        circular: bool = False,
        seed: int = 31,
    ) -> Case:
        """pad_0 and pad_1 behind the first two axes, or lp and rp before and behind each of four. tfrm: x is a tensor as it lies (0), one
        whose first two axes are exchanged in memory (1), or a view of a larger one (2)."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne_a, "ne_a")
        given = {"lp0": lp0, "rp0": rp0, "lp1": lp1, "rp1": rp1, "lp2": lp2, "rp2": rp2, "lp3": lp3, "rp3": rp3}
        around = any(value is not None for value in given.values())
        if around and (pad_0 is not None or pad_1 is not None):
            raise CaseLineError("PAD: pad_0 and pad_1 with lp0, rp0...: expected one or the other")
        if tfrm not in (0, 1, 2) or (tfrm and not around):
            raise CaseLineError(f"PAD: tfrm={tfrm}: expected 0 to 2, and lp0, rp0... with it")
        pads = {key: value or 0 for key, value in (given if around else {"pad_0": pad_0, "pad_1": pad_1}).items()}
        if any(not isinstance(n, int) or not 0 <= n < 1 << 20 for n in pads.values()):
            raise CaseLineError(f"PAD: {', '.join(f'{k}={n}' for k, n in pads.items())}: expected whole numbers from 0")
        before = tuple(pads.get(f"lp{axis}", 0) for axis in (3, 2, 1, 0))
        behind = (0, 0, pads["pad_1"], pads["pad_0"]) if not around else tuple(pads[f"rp{axis}"] for axis in (3, 2, 1, 0))
        big = sized(tuple(b + n + e for b, n, e in zip(before, shape, behind, strict=True)))
        inner, view = shape, View.whole(shape)
        if tfrm == 1:
            inner = (*shape[:2], shape[3], shape[2])
            view = permuted(inner, (1, 0, 2, 3))
        elif tfrm == 2:
            inner, view = view_in(shape, (2, 2, 2, 2))
        sized(inner)

        def make(rng: np.random.Generator) -> Problem:
            params: dict[str, Any] = {"shape": big, "before": before} if around else {"shape": big}
            params |= {"circular": True} if circular else {}
            params |= {"views": {0: view}} if tfrm else {}
            node = Node("PAD", (Tensor("x", "F32", inner, "input"),), (Tensor("y", "F32", big),), params)
            return Problem(node, {"x": random_values("F32", inner, rng)})

        shown = {"type": type.lower(), "ne_a": ne_of(shape), **pads, **({"tfrm": tfrm} if around else {}), "circular": int(circular)}
        return Case("PAD", {**shown, "seed": seed}, make, seed)


@register
class Permute(StridedCopies):
    """PERMUTE(x; axes) -> numpy's transpose, as a tensor of its own."""

    name = "PERMUTE"
    formula = "permute(x)"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.transpose(inputs[0], params["axes"])]

    def launches(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        lead = 4 - len(x.shape)
        axes = [*range(lead), *(lead + a for a in node.params["axes"])]
        strides = _strides(x.shape)
        return [strided_copy(node, ctx, x, y, _four(y.shape), _four(y.shape), [strides[a] for a in axes], _strides(y.shape))]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(("3x5x7",), (5, 7, 3), (1, 2, 0))
        yield self.build_case(("2x3x4x32",), (2, 4, 3, 32), (0, 2, 1, 3))

    def full_cases(self) -> Iterator[Case]:
        four = ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1), (0, 1, 2, 3))
        orders: list[tuple[Shape, Shape]] = [
            *product(((2, 3, 4, 32), (5, 7, 11, 13), (1, 64, 3, 8)), four),
            *product(((33, 65), (1, 128), (512, 4)), ((1, 0), (0, 1))),
        ]
        for shape, axes in orders:
            yield self.build_case((by_x(shape),), tuple(shape[a] for a in axes), axes)

    def build_case(self, ne: tuple[str | int, ...], out: Shape, axes: Shape, type: str = "F32", seed: int = 31) -> Case:
        return self.strided_case(ne, out, type, seed, axes=axes)

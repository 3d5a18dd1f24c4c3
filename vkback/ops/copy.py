"""Ops that only move values (shaders/copy): CPY, CONT, REPEAT, CONCAT, PAD, PERMUTE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops import copy_cases, encode
from vkback.ops.base import (
    VALUE_BYTES,
    Arg,
    Array,
    Case,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Rounded,
    Shape,
    Tolerance,
    ceil_div,
    declare,
    is_coded,
    moves_values,
    nbytes,
    pack_push,
    register,
    shards,
    spread,
    weight_push,
)
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.code_books import decoder
from vkback.ops.coded import as_floats
from vkback.ops.general import (
    DTYPES,
    INTEGERS,
    copied,
    is_general,
    lowered,
    permuted,
    rounded_to,
    stored_tolerance,
    view_in,
    views_of,
)
from vkback.ops.mat_vec import QUANTS
from vkback.ops.peer import Four, ne_of, one_of_types, shape_of, sized, tensor_type, type_word
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
    """A copy. params: `view` (View of x), `to` (View of y, whose other values stay: y is then an input, too), by default all values;
    `to_integers`, where floats become integers, towards zero.

    Any plain type becomes any other. A quantized tensor or weight becomes floats, rows of floats become those of a quantized tensor that is
    encoded (vkback/ops/encode.py), and quantized rows move as they are between tensors of one type.
    """

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = inputs[0]
        values = params["view"].of(np.ascontiguousarray(x)) if "view" in params else x
        values = values if values.dtype.kind == "i" else values.astype(np.float64)
        if params.get("to_integers"):
            values = np.trunc(values).astype(np.int64)
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
        if is_coded(y):
            return into_coded(node, ctx, source, target)
        if is_coded(x):
            if "to" not in node.params and (y.type == "F32" or (y.type == "F16" and source.shape[-1] % 2 == 0)):
                return [self._decoded(node, ctx, source)]
            copies, floats = as_floats(node, ctx, x, source)
            return [*copies, *anyhow(node, ctx, floats, View.whole(floats.shape), y, target)]
        if (x.type, y.type) in PAIRS and whole and x.elements % 2 == 0 and x.type != "I32":
            return [self._in_pairs(node, ctx)]
        alike = len({"view", "to"} & set(node.params)) < 2 or source.shape == target.shape
        if (x.type, y.type) in PAIRS and alike and (y.type != "F16" or in_pairs(node, source, target)):
            return [self._boxed(node, ctx, source, target)]
        return anyhow(node, ctx, x, source, y, target)

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
        source, target = source.four(), target.four()
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

    def case(self, params: Mapping[str, Any]) -> Case:
        """Lines of test-backend-ops have other parameters than those of views: see copy_cases."""
        made = copy_cases.peer_case(self.name, params)
        return made if made is not None else super().case(params)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        x, y = node.inputs[0], node.outputs[0]
        if x.type == y.type and (is_coded(y) or not is_coded(x)):
            return EXACT
        if is_coded(y):
            return encode.loose(y.type)
        return stored_tolerance(DECODED if is_coded(x) else EXACT, y.type)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        x, y = node.inputs[0], node.outputs[0]
        if x.type == y.type or y.type not in encode.SAME_RULE:
            return None
        values = self.reference(inputs, node.params)[0]
        return Rounded([encode.as_encoded(y.type, values.reshape(-1, y.shape[-1]))], encode.tight(y.type, x.type, y.elements))


def in_pairs(node: Node, source: View, target: View) -> bool:
    """Whether copy/box.comp can write F16: two neighbours of even rows at once."""
    into = (target if "to" in node.params else View.whole(source.shape)).four()
    return into.strides[3] == 1 and not any(s % 2 for s in (source.elements, into.offset, into.shape[3], *into.strides[:3]))


def anyhow(node: Node, ctx: LowerContext, x: Tensor, source: View, y: Tensor, target: View) -> list[Dispatch]:
    """A copy between any plain types and views. Where their shapes differ, values go in the order in which either counts them."""
    if source.shape == target.shape or target == View.whole(y.shape):
        whole = target == View.whole(y.shape)
        return [copied(x, y, node, ctx, source=source, target=None if whole else target)]
    between = Tensor(f"{node.name}.values", y.type, target.shape)
    if source == View.whole(x.shape) and x.type == y.type:
        return [copied(x, y, node, ctx, source=View.whole(target.shape), target=target)]
    return [copied(x, between, node, ctx, source=source), copied(between, y, node, ctx, target=target)]


def into_coded(node: Node, ctx: LowerContext, source: View, target: View) -> list[Dispatch]:
    """Rows into a quantized tensor: as they are from one of the same type, else encoded."""
    x, y = node.inputs[0], node.outputs[0]
    k = y.shape[-1]
    into = target.four()
    if into.shape[3] != k or into.strides[3] != 1 or any(s % k for s in into.strides[:3]):
        raise PlanError(f"[{node.op}] {node.name}: {y}: {target} is not made of whole rows")
    if is_coded(x) and x.type == y.type:
        return same_rows(node, ctx, source, target)
    copies, floats = as_floats(node, ctx, x, source)
    n3, n2, n1 = into.shape[:3]
    s3, s2, s1 = (s // k for s in into.strides[:3])
    return [*copies, encode.encoded(node, ctx, floats, y, (n1, n2, n3), (s1, s2, s3), into.offset // k)]


def same_rows(node: Node, ctx: LowerContext, source: View, target: View) -> list[Dispatch]:
    """Rows of a quantized tensor, of which every plane's are moved as they are. The target's rows are all of y's in some order."""
    x, y = node.inputs[0], node.outputs[0]
    k = x.shape[-1]
    a, b = source.four(), target.four()
    rows = y.elements // k
    in_rows = a.shape[3] == k and a.strides[3] == 1 and not any(s % k for s in (a.offset, *a.strides[:3]))
    if not in_rows or b.elements != y.elements or y.shape[-1] != k:
        raise PlanError(f"[{node.op}] {node.name}: {x} to {y}: quantized values move by whole rows, into all rows of the target")
    # y's rows as they lie: its view's axes from the slowest to the fastest, and how the view counts along each.
    counts = View.whole((*b.shape[:3], 1)).strides[:3]
    axes = sorted(range(3), key=lambda axis: (-b.strides[axis], -b.shape[axis]))
    push = [*(b.shape[i] for i in axes), *(counts[i] for i in axes), *a.shape[:3], *(s // k for s in a.strides[:3])]
    here, there = (quants.layout(t.type, t.elements // k, k) for t in (x, y))
    choice = ctx.tuning.pick("copy", elements=x.elements)
    found = []
    for number, (from_plane, to_plane) in enumerate(zip(here.planes, there.planes, strict=True)):
        words = ceil_div(rows * to_plane.row_bytes, 4)
        wg = workgroup_size(ctx.caps, choice["wg_size"], words)
        found.append(Dispatch(
            Variant("copy/plane_rows.comp", (("WG_SIZE", wg),)),
            (Arg(x), Arg(y, "w", part=f"plane {number}")),
            pack_push(*push, a.offset // k, rows, to_plane.row_bytes, from_plane.offset // 4, to_plane.offset // 4),
            spread(ceil_div(words, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=2 * rows * to_plane.row_bytes,
        ))  # fmt: skip
    return found


def some(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values of a type: numbers in -1..1, or any whole ones."""
    if kind == "I32":
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    if kind in INTEGERS:
        values: Array = rng.integers(np.iinfo(DTYPES[kind]).min, np.iinfo(DTYPES[kind]).max, shape, DTYPES[kind], endpoint=True)
        return values
    return rounded_to(kind, rng.uniform(-1, 1, shape))


@register
class Cpy(Convert):
    """CPY(x); see Convert."""

    name = "CPY"
    formula = "x->y"
    peer_nmse = 1e-6

    def cases(self) -> Iterator[Case]:
        yield from super().cases()
        yield copy_cases.cpy_case("q4_0", "q4_0", (96, 2, 3, 4), permute_src=(0, 3, 1, 2), permute_dst=(0, 2, 1, 3))
        yield copy_cases.cpy_case("bf16", "q5_1", (32, 3, 2, 2), permute_src=(0, 2, 1, 3))
        yield copy_cases.cpy_case("f32", "i32", (7, 2, 3, 1), permute_src=(1, 0, 2, 3))
        yield copy_cases.cpy_case("f16", "f16", (3, 5, 7, 2), ne_dst=(7, 5, 3, 2), permute_dst=(0, 2, 1, 3))

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
        for kind, source in product(encode.ENCODED, ("f32", "f16", "bf16")):
            yield copy_cases.cpy_case(source, type_word(kind), (256, 4, 4, 4))
        for quant in QUANTS:
            word = type_word(quant)
            yield copy_cases.cpy_case(word, word, (256, 2, 3, 4), permute_src=(0, 3, 1, 2), permute_dst=(0, 2, 1, 3))

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case((n, 4096), "F32", "F16")


@register
class Cont(Convert):
    """CONT(x); see Convert."""

    name = "CONT"
    formula = "cont(x)"

    def cases(self) -> Iterator[Case]:
        for type in ("f32", "f16", "i32", "bf16"):
            yield self.line_case(type, (32, 5, 3))
            yield self.line_case(type, (6, 5, 4), permute=(1, 2, 0, 3))
            yield self.line_case(type, (7, 5, 3), use_view_slice=True)

    def full_cases(self) -> Iterator[Case]:
        orders: tuple[Four, ...] = ((0, 0, 0, 0), (2, 1, 0, 3), (0, 2, 1, 3), (1, 2, 0, 3))
        for type, ne, permute in product(("f32", "f16", "i32", "bf16"), CONT_SIZES, orders):
            yield self.line_case(type, ne, permute=permute)
            if not any(permute):
                yield self.line_case(type, ne, use_view_slice=True)

    def case(self, params: Mapping[str, Any]) -> Case:
        return call_with(self.line_case, params, op=self.name, further=(), example=lambda: next(self.cases()).line)

    def line_case(
        self, type: str = "f32", ne: Shape = (10, 10, 10, 1), use_view_slice: bool = False, permute: Four = (0, 0, 0, 0), seed: int = 29
    ) -> Case:
        """use_view_slice: of the second axis only the last; permute: axis i of ne becomes axis permute[i], all zeros: none does."""
        kind, shape = one_of_types(type, VALUE_BYTES), shape_of(ne)
        view = View.whole(shape)
        if any(permute) and sorted(permute) != [0, 1, 2, 3]:
            raise CaseLineError(f"CONT: permute=[{','.join(map(str, permute))}]: expected an order of 0 to 3, or all zeros")
        if use_view_slice and any(permute):
            raise PlanError("[CONT] use_view_slice=1 with permute: expected one of them")
        if use_view_slice:
            view = View((shape[2] - 1) * shape[3], (*shape[:2], 1, shape[3]), view.strides)
        if any(permute):
            view = permuted(shape, permute)

        def make(rng: np.random.Generator) -> Problem:
            node = Node("CONT", (Tensor("x", kind, shape, "input"),), (Tensor("y", kind, view.shape),), {"view": view})
            return Problem(node, {"x": some(kind, shape, rng)})

        shown = {"type": type_word(kind), "ne": ne_of(shape), "use_view_slice": int(use_view_slice), "permute": permute, "seed": seed}
        return Case("CONT", shown, make, seed)


CONT_SIZES: tuple[Shape, ...] = ((2, 1, 1, 1), (1, 8, 17, 1), (2, 3, 5, 7), (33, 5, 7, 1), (64, 3, 65, 1))
"""Of the full set."""


@register
class Dup(Convert):
    """DUP(x); see Convert."""

    name = "DUP"

    def cases(self) -> Iterator[Case]:
        yield self.case({"type": "i16", "ne": (10, 8, 3, 1), "permute": (0, 2, 1, 3)})
        yield self.case({"type": "bf16", "ne": (7, 5, 3, 1)})

    def full_cases(self) -> Iterator[Case]:
        yield from ()


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
        if is_general(node):
            return lowered(self, node, ctx)
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
        for type, ne, nr in (("f32", (21, 10), (1, 2, 1, 1)), ("i32", (7, 5), (3, 2, 1, 1)), ("f32", (4, 1, 3), (1, 5, 1, 2)),
                             ("i16", (7, 5, 2), (2, 1, 1, 2)), ("bf16", (10, 5), (2, 1, 2, 1))):  # fmt: skip
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
            return Problem(node, {"x": some(kind, small, rng)})

        return Case("REPEAT", {"type": type_word(kind), "ne": ne_of(small), "nr": ne_of(times), "seed": seed}, make, seed)


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

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return self._anyhow(node, ctx) if is_general(node) else super().lower(node, ctx)

    def _anyhow(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        """Inputs of any type that lie anyhow, each copied to its place."""
        y, axis, start = node.outputs[0], node.params["axis"], 0
        strides, made = View.whole(y.shape).strides, []
        for i, t in enumerate(node.inputs):
            source = views_of(node.params).get(i, View.whole(t.shape))
            made.append(copied(t, y, node, ctx, source=source, target=View(start * strides[axis], source.shape, strides)))
            start += source.shape[axis]
        return made

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", (5, 4, 3), 2, 1)
        yield self.build_case("i32", (5, 4, 3), 2, 1)
        yield self.build_case("f32", (64, 2), 33, 0)
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

    def build_case(
        self, type: str = "f32", ne_a: Shape = (10, 5, 5, 5), ne_b_d: int = 5, dim: int = 2, v: int = 0, seed: int = 31
    ) -> Case:
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
            values = {t.name: some(stored, t.shape, rng) for t in tensors}
            return Problem(Node("CONCAT", tensors, (Tensor("y", stored, out),), params), values)

        shown = {"type": type_word(kind), "ne_a": ne_of(a_shape), "ne_b_d": ne_b_d, "dim": dim, "v": v, "seed": seed}
        return Case("CONCAT", shown, make, seed)


@register
class Pad(Boxed):
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

    def boxes(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if "before" in node.params or node.params.get("circular"):
            return [self._around(node, ctx)]
        return [_box(node, ctx, x, y, _four(y.shape), _four(x.shape), _strides(x.shape), _strides(y.shape), fill=True)]

    def _around(self, node: Node, ctx: LowerContext) -> Dispatch:
        x, y = node.inputs[0], node.outputs[0]
        before = (*(0,) * (4 - len(x.shape)), *node.params.get("before", (0,) * len(x.shape)))
        choice = ctx.tuning.pick("copy", elements=y.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], y.elements)
        return Dispatch(
            Variant("copy/pad.comp", (("CIRCULAR", int(bool(node.params.get("circular")))), ("WG_SIZE", wg))),
            (Arg(x), Arg(y, "w")),
            pack_push(*_four(y.shape), *_four(x.shape), *_strides(x.shape), *before, 0),
            spread(ceil_div(y.elements, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=nbytes(x) + nbytes(y),
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
        self, type: str = "f32", ne_a: Shape = (512, 512, 3, 1), pad_0: int | None = None, pad_1: int | None = None, lp0: int | None = None,
        rp0: int | None = None, lp1: int | None = None, rp1: int | None = None, lp2: int | None = None, rp2: int | None = None,
        lp3: int | None = None, rp3: int | None = None, tfrm: int = 0, circular: bool = False, seed: int = 31,
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
            return Problem(node, {"x": some("F32", inner, rng)})

        shown = {"type": type.lower(), "ne_a": ne_of(shape), **pads, **({"tfrm": tfrm} if around else {}), "circular": int(circular)}
        return Case("PAD", {**shown, "seed": seed}, make, seed)


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

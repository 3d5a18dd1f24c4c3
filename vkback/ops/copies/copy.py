"""Copies between types and layouts (shaders/copy): CPY, CONT, DUP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Rounded, Shape, Tolerance
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.codebooks import decoder_of
from vkback.ops.copies import copy_cases, encode
from vkback.ops.copies.strided import EXACT, strided_copy
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.general import copy_dispatch, permuted, random_values, stored_tolerance
from vkback.ops.ggml_words import Four, ne_of, one_of_types, shape_of, tensor_type, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import QUANTS
from vkback.ops.op import Op, moves_values, register
from vkback.ops.storage import VALUE_BYTES, in_planes, nbytes, shards, weight_push
from vkback.ops.view import ORDERS, TRANSPOSED, View, laid_out

DECODED = Tolerance(1e-12, 1e-5, "a multiplication and a subtraction in f32 of numbers that a file's block holds exactly")

PAIRS = (("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16"), ("I32", "I32"))
"""Types from and to that copy/convert.comp and copy/box.comp copy."""

SHAPES: tuple[Shape, ...] = (
    (2,),
    (1, 4096),
    (3, 5, 32),
    (5, 7, 11, 2),
    (128, 2, 2, 2),
    (7, 6),
    (1, 64, 1, 3),
    (2, 3, 1000),
    (33, 34),
    (4, 262144),
)
BOXES: tuple[Shape, ...] = ((2, 3, 4, 32), (6, 8, 10, 12), (3, 5, 7, 32), (10, 10, 10, 2))
CONT_SIZES: tuple[Shape, ...] = ((2, 1, 1, 1), (1, 8, 17, 1), (2, 3, 5, 7), (33, 5, 7, 1), (64, 3, 65, 1))
"""Of the full set: shapes of whole copies, of copies in another order, and of CONT."""


class Convert(Op):
    """A copy. params: `view` (View of x), `to` (View of y, whose other values stay: y is then an input, too), by default all values;
    `to_integers`, where floats become integers, towards zero.

    Any plain type becomes any other. A quantized tensor or weight becomes floats, rows of floats become those of a quantized tensor that is
    encoded (vkback/ops/copies/encode.py), and quantized rows move as they are between tensors of one type.
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
        if in_planes(y):
            return into_coded(node, ctx, source, target)
        if in_planes(x):
            if "to" not in node.params and (y.type == "F32" or (y.type == "F16" and source.shape[-1] % 2 == 0)):
                return [self._decoded(node, ctx, source)]
            copies, floats = as_floats(node, ctx, x, source)
            return [*copies, *copy_strided(node, ctx, floats, View.whole(floats.shape), y, target)]
        if (x.type, y.type) in PAIRS and whole and x.elements % 2 == 0 and x.type != "I32":
            return [self._in_pairs(node, ctx)]
        alike = len({"view", "to"} & set(node.params)) < 2 or source.shape == target.shape
        if (x.type, y.type) in PAIRS and alike and (y.type != "F16" or in_pairs(node, source, target)):
            return [self._lower_strided(node, ctx, source, target)]
        return copy_strided(node, ctx, x, source, y, target)

    def _in_pairs(self, node: Node, ctx: LowerContext) -> Dispatch:
        x, y = node.inputs[0], node.outputs[0]
        pairs = x.elements // 2
        choice = ctx.tuning.pick("copy", elements=x.elements)
        defines = {"FROM_F16": int(x.type == "F16"), "TO_F16": int(y.type == "F16")}
        return by_threads(node, ctx, "copy/convert.comp", (Arg(x), Arg(y, "w")), (pairs,), pairs, defines, choice=choice)

    def _lower_strided(self, node: Node, ctx: LowerContext, source: View, target: View) -> Dispatch:
        """Whichever side is whole takes the other's shape."""
        x, y = node.inputs[0], node.outputs[0]
        if "view" not in node.params:
            source = View.whole(target.shape)
        elif "to" not in node.params:
            target = View.whole(source.shape)
        source, target = source.four(), target.four()
        return strided_copy(
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
            f"it does not fit one binding, but takes {len(parts)}"
            if len(parts) > 1
            else f"weights become F32 or F16, not {y.type}"
            if y.type not in ("F32", "F16") or "to" in node.params
            else f"{source} is not made of whole rows from a multiple of 32 on"
            if four.strides[3] != 1 or any(s % columns for s in four.strides[:3]) or column0 % 32 or column0 + k > columns
            else ""
        )
        if problem:
            raise PlanError(f"[{self.name}] {node.name}: {x}: {problem}")
        threads = prod(four.shape[:3]) * ceil_div(k, 32)
        choice = ctx.tuning.pick("copy", elements=four.elements)
        defines = {"TO_F16": int(y.type == "F16"), "WIDTH": 4 if k % 4 == 0 else 1, **decoder_of(x.type, columns, ctx)}
        push = (*weight_push(x.type, parts[0].layout, columns), *four.shape[:3], *(s // columns for s in four.strides[:3]))
        return by_threads(
            node,
            ctx,
            "copy/decode.comp",
            (Arg(x), Arg(y, "w")),
            (*push, row0, column0 // 32, k),
            threads,
            defines,
            choice=choice,
            moved=prod(four.shape[:3]) * quants.row_bytes(x.type, columns) * k // columns + nbytes(y),
        )

    def cases(self) -> Iterator[Case]:
        for types in PAIRS:
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
        for (a, b), shape, order in product(PAIRS, BOXES, (*ORDERS, *TRANSPOSED)):
            yield self.build_case(shape, a, b, order=order)

    def build_case(
        self, ne: Shape, type_src: str, type_dst: str, order: Shape = (), to: Shape = (), gap: int = 0, weight: bool = False, seed: int = 29
    ) -> Case:
        """order, gap: how the values lie in x (see `laid_out`); to: in y likewise, a tensor that holds values already."""
        type_src, type_dst = tensor_type(type_src, "type_src"), tensor_type(type_dst, "type_dst")
        x_shape, view = laid_out(ne, order, gap=gap if order else 0)
        y_shape, into = laid_out(ne, to, gap=gap if to else 0)
        params = {"view": view} if order else {}
        params |= {"to": into} if to else {}

        def make(rng: np.random.Generator) -> Problem:
            x = Tensor("x", type_src, x_shape, "weight" if weight else "input")
            y = Tensor("y", type_dst, y_shape, "state" if to else "node")
            blocks = quants.random_blocks(type_src, prod(x_shape[:-1]), x_shape[-1], rng) if weight else None
            values = {"x": random_values(type_src, x_shape, rng) if blocks is None else blocks}
            if to:
                values["y"] = random_values(type_dst, y_shape, rng)
            return Problem(Node(self.name, (x, y) if to else (x,), (y,), params), values)

        shown: dict[str, Any] = {"type_src": type_src, "type_dst": type_dst, "ne": ne}
        shown |= {"order": order} if order else {}
        shown |= {"to": to} if to else {}
        shown |= {"gap": gap} if gap else {}
        shown |= {"weight": 1} if weight else {}
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def case(self, params: Mapping[str, Any]) -> Case:
        """Lines of test-backend-ops have other parameters than those of views: see copy_cases."""
        copy_case = copy_cases.ggml_case(self.name, params)
        return copy_case if copy_case is not None else super().case(params)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        x, y = node.inputs[0], node.outputs[0]
        if x.type == y.type and (in_planes(y) or not in_planes(x)):
            return EXACT
        if in_planes(y):
            return encode.loose(y.type)
        return stored_tolerance(DECODED if in_planes(x) else EXACT, y.type)

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


def copy_strided(node: Node, ctx: LowerContext, x: Tensor, source: View, y: Tensor, target: View) -> list[Dispatch]:
    """A copy between any plain types and views. Where their shapes differ, values go in the order in which either counts them."""
    if source.shape == target.shape or target == View.whole(y.shape):
        whole = target == View.whole(y.shape)
        return [copy_dispatch(x, y, node, ctx, source=source, target=None if whole else target)]
    between = Tensor(f"{node.name}.values", y.type, target.shape)
    if source == View.whole(x.shape) and x.type == y.type:
        return [copy_dispatch(x, y, node, ctx, source=View.whole(target.shape), target=target)]
    return [copy_dispatch(x, between, node, ctx, source=source), copy_dispatch(between, y, node, ctx, target=target)]


def into_coded(node: Node, ctx: LowerContext, source: View, target: View) -> list[Dispatch]:
    """Rows into a quantized tensor: as they are from one of the same type, else encoded."""
    x, y = node.inputs[0], node.outputs[0]
    k = y.shape[-1]
    into = target.four()
    if into.shape[3] != k or into.strides[3] != 1 or any(s % k for s in into.strides[:3]):
        raise PlanError(f"[{node.op}] {node.name}: {y}: {target} is not made of whole rows")
    if in_planes(x) and x.type == y.type:
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
        found.append(
            by_threads(
                node,
                ctx,
                "copy/plane_rows.comp",
                (Arg(x), Arg(y, "w", part=f"plane {number}")),
                (*push, a.offset // k, rows, to_plane.row_bytes, from_plane.offset // 4, to_plane.offset // 4),
                words,
                choice=choice,
                moved=2 * rows * to_plane.row_bytes,
            )
        )
    return found


@register
class Cpy(Convert):
    """CPY(x); see Convert."""

    name = "CPY"
    formula = "x->y"
    ggml_nmse = 1e-6

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
        for (a, b), shape, order in product(PAIRS, BOXES, (*ORDERS, *TRANSPOSED)):
            yield self.build_case(shape, a, b, order=order, gap=6)
        for (a, b), shape, to in product(PAIRS, ((3, 5, 32), (6, 8, 10)), ((0, 1, 2), (1, 0, 2))):
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
        return call_with(self.line_case, params, op=self.name, extra_keys=(), example=lambda: next(self.cases()).line)

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
            return Problem(node, {"x": random_values(kind, shape, rng)})

        shown = {"type": type_word(kind), "ne": ne_of(shape), "use_view_slice": int(use_view_slice), "permute": permute, "seed": seed}
        return Case("CONT", shown, make, seed)


@register
class Dup(Convert):
    """DUP(x); see Convert."""

    name = "DUP"

    def cases(self) -> Iterator[Case]:
        yield self.case({"type": "i16", "ne": (10, 8, 3, 1), "permute": (0, 2, 1, 3)})
        yield self.case({"type": "bf16", "ne": (7, 5, 3, 1)})

    def full_cases(self) -> Iterator[Case]:
        yield from ()

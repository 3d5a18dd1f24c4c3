"""SET and ACC: a tensor of which a part is replaced by, or added to, another. They are chains of copies and an addition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Dispatch
from vkback.ops.general import copy_dispatch, random_values
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, register
from vkback.ops.view import View


class Part(Op):
    """(a, b; part: View of a's shape with that of b) -> a with that part changed; the output may be a."""

    def changed(self, part: Array, b: Array) -> Array:
        raise NotImplementedError

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, b = (x if x.dtype.kind == "i" else np.asarray(x, np.float64) for x in inputs)
        out = np.ascontiguousarray(a).copy()
        part = params["part"].of(out)
        part[...] = self.changed(part, b.reshape(part.shape))
        return [out]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, b = node.inputs
        y, part = node.outputs[0], node.params["part"]
        if a.type != y.type or b.type != y.type or part.elements != b.elements:
            raise PlanError(f"[{self.name}] {node.name}: {b} into {part} of {a}: expected one type and as many values")
        whole = [] if y.name == a.name else [copy_dispatch(a, y, node, ctx)]
        more, values = self.values(node, ctx)
        return [*whole, *more, copy_dispatch(values, y, node, ctx, source=View.whole(part.shape), target=part)]

    def values(self, node: Node, ctx: LowerContext) -> tuple[list[Dispatch], Tensor]:
        """What makes the new values of the part, and the tensor that has them."""
        return [], node.inputs[1]


@register
class Set(Part):
    """SET(a, b; part) -> a with that part from b."""

    name = "SET"

    def changed(self, part: Array, b: Array) -> Array:
        return b

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "values are moved, not computed")

    def build_case(
        self, type_src: str = "f32", type_dst: str = "f32", ne: Shape = (6, 5, 4, 3), dim: int = 1, inplace: bool = False, seed: int = 3
    ) -> Case:
        """b of sizes ne, a twice as long along the first `dim` axes; the part begins in a's middle."""
        kinds = one_of_types(type_src, ("F32", "I32"), "type_src"), one_of_types(type_dst, ("F32", "I32"), "type_dst")
        if kinds[0] != kinds[1]:
            raise PlanError(f"type_src={type_src}, type_dst={type_dst}: expected one type")
        if not 1 <= dim <= 4:
            raise CaseLineError(f"dim={dim}: expected 1 to 4")
        shape = shape_of(ne)
        big = tuple(n * (2 if axis >= 4 - dim else 1) for axis, n in enumerate(shape))
        steps = View.whole(big).strides
        offset = sum(n // 2 * s for n, s, axis in zip(shape, steps, range(4), strict=True) if axis >= 4 - dim)
        return _case(
            self.name,
            {"type_src": type_word(kinds[0]), "type_dst": type_word(kinds[1]), "ne": ne_of(shape), "dim": dim, "inplace": int(inplace)},
            kinds[0],
            big,
            shape,
            View(offset, shape, steps),
            inplace,
            seed,
        )

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", "f32", (6, 5, 4, 3), 3, True)
        yield self.build_case("i32", "i32", (6, 5, 4, 3), 2)


@register
class Acc(Part):
    """ACC(a F32, b F32; part) -> a with b added to that part."""

    name = "ACC"

    def changed(self, part: Array, b: Array) -> Array:
        return np.asarray(part + b)

    def values(self, node: Node, ctx: LowerContext) -> tuple[list[Dispatch], Tensor]:
        a, b = node.inputs
        part = node.params["part"]
        taken, added = (Tensor(f"{node.name}.{name}", "F32", part.shape) for name in ("part", "sum"))
        plain = Tensor(b.name, b.type, part.shape, b.kind)
        return [copy_dispatch(a, taken, node, ctx, source=part), *OPS["ADD"].lower(Node("ADD", (taken, plain), (added,)), ctx)], added

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-13, 1e-6, "one f32 addition")

    def build_case(
        self, type: str = "f32", ne_a: Shape = (256, 17, 2, 3), ne_b: Shape = (256, 16, 2, 3), stride_dim: int = -1, seed: int = 3
    ) -> Case:
        """stride_dim: values of that axis lie twice as far apart where a has room for it; -1: none do."""
        one_of_types(type, ("F32",))
        a, b = shape_of(ne_a, "ne_a"), shape_of(ne_b, "ne_b")
        if any(big < small for big, small in zip(a, b, strict=True)) or not -1 <= stride_dim <= 3:
            raise CaseLineError(f"ne_a={list(ne_a)}, ne_b={list(ne_b)}, stride_dim={stride_dim}: expected b within a, and -1 to 3")
        strides = list(View.whole(a).strides)
        if stride_dim > 0 and 2 * b[3 - stride_dim] <= a[3 - stride_dim]:
            strides[3 - stride_dim] *= 2
        shown = {"type": "f32", "ne_a": ne_of(a), "ne_b": ne_of(b), "stride_dim": stride_dim}
        return _case(self.name, shown, "F32", a, b, View(0, b, tuple(strides)), False, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne_a=(33, 7, 2, 4), ne_b=(31, 6, 2, 2), stride_dim=3)


def _case(op: str, shown: Mapping[str, Any], kind: str, big: Shape, small: Shape, part: View, inplace: bool, seed: int) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        a, b = Tensor("a", kind, big, "input"), Tensor("b", kind, small, "input")
        y = a if inplace else Tensor("y", kind, big)
        return Problem(Node(op, (a, b), (y,), {"part": part}), {t.name: random_values(kind, t.shape, rng) for t in (a, b)})

    return Case(op, {**shown, "seed": seed}, make, seed)

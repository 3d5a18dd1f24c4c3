"""Lines of test-backend-ops about CPY and DUP."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.general import INTEGERS, permuted, rounded_to
from vkback.ops.ggml_words import Four, ne_of, operand, shape_of, sized, tensor_type, type_word
from vkback.ops.storage import VALUE_BYTES, in_planes
from vkback.ops.view import View

NONE = (0, 0, 0, 0)
"""What a line has for no permutation."""


def ggml_case(op: str, params: Mapping[str, Any]) -> Case | None:
    """The case of a line of test-backend-ops; None for parameters of views, which this project's own cases have."""
    if op == "CPY" and "ne_src" in params:
        return call_with(cpy_case, params, op=op, extra_keys=(), example=lambda: cpy_case().line)
    if op == "DUP":
        return call_with(dup_case, params, op=op, extra_keys=(), example=lambda: dup_case().line)
    return None


def view_of(shape: Shape, permute: Four, key: str) -> View:
    """The axes of a whole tensor exchanged as ggml_permute does; NONE leaves them. Raises CaseLineError."""
    if permute == NONE:
        return View.whole(shape)
    if sorted(permute) != [0, 1, 2, 3]:
        raise CaseLineError(f"{key}={list(permute)}: expected the axes 0 to 3 in some order, or [0,0,0,0]")
    return permuted(shape, permute)


def cpy_case(
    type_src: str = "f32",
    type_dst: str = "f32",
    ne_src: Shape = (10, 10, 10, 1),
    ne_dst: Shape = (),
    permute_src: Four = NONE,
    permute_dst: Four = NONE,
    _src_transpose: bool = False,
    dst_alloc: Shape = (),
    seed: int = 29,
) -> Case:
    """ne_dst: of another shape than the source; dst_alloc: of the tensor whose first values the target is a view of. Values in +-150."""
    kinds = tensor_type(type_src, "type_src"), tensor_type(type_dst, "type_dst")
    shape = shape_of(ne_src, "ne_src")
    _whole_blocks(kinds[0], shape, "ne_src")
    source = view_of(shape, permute_src, "permute_src")
    if _src_transpose:
        source = View(0, *_swapped(source))
    inner = shape_of(ne_dst, "ne_dst") if ne_dst else source.shape
    if prod(inner) != source.elements:
        raise CaseLineError(f"ne_dst={list(ne_dst)}: expected as many values as ne_src={list(ne_src)} has")
    _whole_blocks(kinds[1], inner, "ne_dst")
    target = view_of(inner, permute_dst, "permute_dst")
    if dst_alloc:
        outer = shape_of(dst_alloc, "dst_alloc")
        if any(a < b for a, b in zip(outer, inner, strict=True)) or permute_dst != NONE:
            raise CaseLineError(f"dst_alloc={list(dst_alloc)}: expected sizes not below ne_dst, and no permute_dst")
        inner, target = outer, View(0, inner, View.whole(outer).strides)
    into = target != View.whole(inner)

    def make(rng: np.random.Generator) -> Problem:
        x = operand("x", kinds[0], shape)
        y = Tensor("y", kinds[1], inner, "state" if into else "node")
        params: dict[str, Any] = {} if source == View.whole(shape) else {"view": source}
        params |= {"to": target} if into else {}
        params |= {"to_integers": True} if kinds[1] in INTEGERS and kinds[0] not in INTEGERS else {}
        values = {"x": numbers(x, rng, 150.0)} | ({"y": numbers(y, rng, 150.0)} if into else {})
        return Problem(Node("CPY", (x, y) if into else (x,), (y,), params), values)

    shown: dict[str, Any] = {"type_src": type_word(kinds[0]), "type_dst": type_word(kinds[1]), "ne_src": ne_of(shape)}
    shown |= {"ne_dst": ne_of(shape_of(ne_dst, "ne_dst"))} if ne_dst else {}
    shown |= {"permute_src": permute_src, "permute_dst": permute_dst, "_src_transpose": int(_src_transpose)}
    shown |= {"dst_alloc": ne_of(shape_of(dst_alloc))} if dst_alloc else {}
    return Case("CPY", {**shown, "seed": seed}, make, seed)


def dup_case(type: str = "f32", ne: Shape = (10, 10, 20, 1), permute: Four = NONE, seed: int = 29) -> Case:
    """Of a tensor, or of one with its axes permuted."""
    kind, shape = tensor_type(type), shape_of(ne)
    source = view_of(shape, permute, "permute")
    _whole_blocks(kind, shape, "ne")
    _whole_blocks(kind, source.shape, "permute")

    def make(rng: np.random.Generator) -> Problem:
        x = operand("x", kind, shape)
        params = {} if permute == NONE else {"view": source}
        return Problem(Node("DUP", (x,), (Tensor("y", kind, source.shape),), params), {"x": numbers(x, rng, 1.0)})

    shown = {"type": type_word(kind), "ne": ne_of(shape)} | ({} if permute == NONE else {"permute": permute})
    return Case("DUP", {**shown, "seed": seed}, make, seed)


def numbers(t: Tensor, rng: np.random.Generator, size: float) -> Array:
    """Values in +-size as the type of a tensor holds them; of quantized types random blocks of about that size; of integers any within."""
    if in_planes(t):
        return quants.random_blocks(t.type, prod(t.shape[:-1]), t.shape[-1], rng, std=size / 2)
    if t.type in INTEGERS:
        top = max(int(size), 100)
        return rounded_to(t.type, rng.integers(-top, top, t.shape))
    return rounded_to(t.type, rng.uniform(-size, size, t.shape))


def _swapped(view: View) -> tuple[Shape, Shape]:
    """Shape and strides with the last two axes exchanged."""
    shape, strides = view.shape, view.strides
    return (*shape[:2], shape[3], shape[2]), (*strides[:2], strides[3], strides[2])


def _whole_blocks(kind: str, shape: Shape, key: str) -> None:
    block = 1 if kind in VALUE_BYTES else quants.quant(kind).block_values
    if shape[3] % block:
        raise CaseLineError(f"{key}: rows of {shape[3]} values are no multiple of the {type_word(kind)} block ({block})")
    sized(shape)

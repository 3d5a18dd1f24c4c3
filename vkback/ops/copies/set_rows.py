"""SET_ROWS as ggml has it (shaders/rows/set_rows_general.comp, shaders/encode): rows by ids into a tensor of any type.

    x any plain type [n3, n2, r, k], ids I32 or I64 [m3, m2, r], cache [n3, n2, rows, k] -> cache, written in place

Row i of x[s, h] becomes row ids[s % m3, h % m2, i] of cache[s, h]; an id outside of it stores nothing. x and ids may be `views`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Rounded, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies import encode
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import rounded_to, stored_tolerance, views_of
from vkback.ops.ggml_words import FLOATS, Four, ne_of, one_of_types, shape_of, sized, tensor_type, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import VALUE_BYTES, in_planes, nbytes
from vkback.ops.view import View
from vkback.quants import QUANTS

_KINDS = {"F32": 0, "F16": 1, "BF16": 2}


def reference(x: Array, ids: Array, cache: Array) -> Array:
    """A copy of the cache with the rows stored, in float64."""
    out = np.asarray(cache, np.float64).copy()
    for s, h in np.ndindex(out.shape[:2]):
        chosen = np.asarray(ids[s % ids.shape[-3], h % ids.shape[-2]])
        real = (chosen >= 0) & (chosen < out.shape[2])
        out[s, h, chosen[real]] = x[s, h][real]
    return out


def lower(node: Node, ctx: LowerContext) -> list[Dispatch]:
    x, ids, cache = node.inputs
    views = views_of(node.params)
    rows, chosen = views.get(0, View.whole(x.shape)), views.get(1, View.whole(ids.shape))
    n3, n2, limit, k = cache.shape
    m3, m2, r = chosen.shape
    if rows.shape != (n3, n2, r, k) or ids.type not in ("I32", "I64") or n2 % m2 or n3 % m3:
        raise PlanError(f"[SET_ROWS] {node.name}: {x} by {ids} into {cache}: expected I32 or I64 ids and rows of {k} that fit them")
    if chosen.offset or chosen.strides[2] != 1 or chosen.strides[0] != m2 * chosen.strides[1]:
        raise PlanError(f"[SET_ROWS] {node.name}: {ids}: {chosen}: expected the first ids of each row")
    copies, floats = as_floats(node, ctx, x, rows)
    size = (chosen.strides[1], m2, m3)
    if in_planes(cache):
        by = encode.RowIds(ids, size, limit)
        return [*copies, encode.encoded(node, ctx, floats, cache, (r, n2, n3), (1, limit, n2 * limit), ids=by)]
    if cache.type not in _KINDS:
        raise PlanError(f"[SET_ROWS] {node.name}: {cache}: expected {', '.join(_KINDS)} or a quantized type")
    elements = floats.elements
    choice = ctx.tuning.pick("rows", k=k, n=n3 * n2 * r)
    words = 2 if ids.type == "I64" else 1
    store = by_threads(
        node,
        ctx,
        "rows/set_rows_general.comp",
        (Arg(floats), Arg(ids), Arg(cache, "rw")),
        (elements, k, r, n2, limit, *size, words, _KINDS[cache.type]),
        elements,
        choice=choice,
        moved=nbytes(floats) + elements * VALUE_BYTES[cache.type],
    )
    return [*copies, store]


def tolerance(node: Node) -> Tolerance:
    cache = node.inputs[2]
    if in_planes(cache):
        return encode.loose(cache.type)
    return stored_tolerance(Tolerance(0.0, 0.0, "values are moved, not computed"), cache.type)


def rounded(inputs: Sequence[Array], node: Node) -> Rounded | None:
    """The rows as vkback.quants encodes them."""
    x, _, cache = node.inputs
    if cache.type not in encode.SAME_RULE:
        return None
    stored = encode.as_encoded(cache.type, np.ascontiguousarray(inputs[0]))
    return Rounded([reference(stored, inputs[1], inputs[2])], encode.tight(cache.type, x.type, cache.elements))


def set_rows_case(
    type_src: str = "f32",
    type_dst: str = "f32",
    type_idx: str = "i64",
    ne: Four = (256, 5, 1, 3),
    nr23: tuple[int, int] = (1, 1),
    r: int = 1,
    v: bool = False,
    seed: int = 19,
) -> Case:
    """ne: of the target, whose third and fourth axis are nr23 times as long while ids repeat; r: rows stored; v: x and ids are the first
    half of the rows of tensors that have r."""
    source, target, by = one_of_types(type_src, FLOATS, "type_src"), tensor_type(type_dst, "type_dst"), tensor_type(type_idx, "type_idx")
    if by not in ("I32", "I64"):
        raise CaseLineError(f"type_idx={type_idx}: expected i32 or i64")
    shape = shape_of(ne)
    block = 1 if target in VALUE_BYTES else QUANTS[target].block_values
    if shape[3] % block:
        raise CaseLineError(f"ne={list(ne)}: rows of {shape[3]} values are no multiple of the {type_word(target)} block ({block})")
    if min(nr23) < 1 or not 1 <= r <= shape[2]:
        raise CaseLineError(f"nr23={list(nr23)}, r={r}: expected both above 0, and r at most the target's {shape[2]} rows")
    outer = sized((shape[0] * nr23[1], shape[1] * nr23[0], shape[2], shape[3]))
    taken = max(1, r // 2) if v else r

    def make(rng: np.random.Generator) -> Problem:
        x = Tensor("x", source, (*outer[:2], r, shape[3]), "input")
        ids = Tensor("ids", by, (*shape[:2], r), "input")
        cache = Tensor("cache", target, outer, "state")
        params: dict[str, Any] = {}
        if taken != r:
            inner = View.whole(x.shape).strides, View.whole(ids.shape).strides
            params = {"views": {0: View(0, (*outer[:2], taken, shape[3]), inner[0]), 1: View(0, (*shape[:2], taken), inner[1])}}
        order = rng.random((*shape[:2], shape[2])).argsort(axis=-1)[..., :r]
        values = {"x": rounded_to(source, rng.uniform(-1, 1, x.shape)), "ids": order.astype(np.int64), "cache": numbers(cache, rng, 1.0)}
        return Problem(Node("SET_ROWS", (x, ids, cache), (cache,), params), values)

    shown = {
        "type_src": type_word(source),
        "type_dst": type_word(target),
        "type_idx": type_word(by),
        "ne": ne_of(shape),
        "nr23": nr23,
        "r": r,
        "v": int(v),
        "seed": seed,
    }
    return Case("SET_ROWS", shown, make, seed)


def cases() -> Iterator[Case]:
    yield set_rows_case("f32", "bf16", "i64", (33, 5, 1, 7), (2, 3), 2, True)
    yield set_rows_case("f16", "f16", "i32", (3, 5, 7, 1), r=2)
    for kind in ("q8_0", "q5_1", "q4_K", "iq2_xs", "iq1_m"):
        yield set_rows_case("f32", kind, "i64", (256, 5, 2, 1), (2, 1), 3)


def full_cases() -> Iterator[Case]:
    shapes: Sequence[tuple[Shape, int, bool]] = (((256, 11, 1, 7), 7, False), ((768, 3, 2, 1), 2, True))
    for source, target, (ne, r, v) in product(("f32", "f16"), (*VALUE_TARGETS, *map(type_word, encode.ENCODED)), shapes):
        yield set_rows_case(source, target, "i64", (ne[0], ne[1], ne[2], ne[3]), (2, 3), r, v)


VALUE_TARGETS = ("f32", "f16", "bf16")

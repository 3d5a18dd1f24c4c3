"""KV caches: their types, and rows stored by SET_ROWS (shaders/cache). Attention reads them as they are
(shaders/attention/cache_load.glsl). A quantized cache lies as weights do (docs/weight_layout.md), its rows being those of all heads.
"""

from __future__ import annotations

import numpy as np

from vkback import quants
from vkback.graph import Node
from vkback.ops.case import Array, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import VALUE_BYTES, nbytes, weight_push
from vkback.ops.workgroup import workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

QUANTIZED = ("Q8_0", "Q4_0")
"""Types of blocks that rows are stored in on the device."""


SCALED_BY = {"Q8_0": 127, "Q4_0": 8}
"""Of a unit, its largest size over its scale."""

F16_ROUNDS_TO_INFINITY = 65520.0
"""The least number that does."""

CACHE_TYPES = {"F16": 0, "Q8_0": 1, "Q4_0": 2, "F32": 3}
"""Types that attention reads, with their numbers in shaders/attention/cache_load.glsl."""


CACHE_WORDS = tuple(kind.lower() for kind in CACHE_TYPES)
"""What users call them."""


def cached_bytes(kind: str, values: int) -> int:
    """Of so many values of a row."""
    return VALUE_BYTES[kind] * values if kind in VALUE_BYTES else quants.row_bytes(kind, values)


def as_stored(kind: str, values: Array) -> Array:
    """Values as a cache of a type holds them, float32. A unit beyond the range of a quantized type is NaN."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    if kind == "F32":
        return rows.reshape(values.shape)
    held = quants.decode(kind, quants.encode(kind, np.nan_to_num(rows))).reshape(-1, UNIT)
    held[~(np.abs(rows.reshape(-1, UNIT)).max(axis=-1) / SCALED_BY[kind] < F16_ROUNDS_TO_INFINITY)] = np.nan
    return held.reshape(values.shape)


def cache_kinds(type_k: str, type_v: str, *widths: int) -> tuple[str, str]:
    """The types of caches by a case's words. Raises CaseLineError for a type that caches do not have, or rows of no whole units."""
    kinds = type_k.upper(), type_v.upper()
    for word, kind in zip((type_k, type_v), kinds, strict=True):
        if kind not in CACHE_TYPES or (kind in QUANTIZED and any(width % UNIT for width in widths)):
            known = " or ".join(name.lower() for name in QUANTIZED)
            raise CaseLineError(f"a cache of {word} for heads of {widths}: expected f16, f32, or {known} and whole units of {UNIT}")
    return kinds[0], kinds[1]


def cache_params(kinds: tuple[str, str]) -> dict[str, str]:
    """Params of a node that stores into caches of these types."""
    return {key: kind for key, kind in zip(("type_k", "type_v"), kinds, strict=True) if kind != "F16"}


def stored_cache(kind: str, values: Array) -> Array:
    """F16 values, some of them NaN, as a cache of a type has them: floats, or rows of blocks whose scale is NaN where a value is."""
    if kind in VALUE_BYTES:
        return values.astype(np.float32) if kind == "F32" else values
    rows = values.reshape(-1, values.shape[-1]).astype(np.float32)
    raw = quants.encode(kind, np.nan_to_num(rows))
    blocks = raw.reshape(len(rows), values.shape[-1] // UNIT, -1)
    blocks[np.isnan(rows).any(axis=1), :, :2] = np.array([np.nan], np.float16).view(np.uint8)
    return raw


def store_units(node: Node, ctx: LowerContext) -> Dispatch:
    """The dispatch of a SET_ROWS into a quantized cache."""
    x, pos, cache = node.inputs
    heads, n_ctx, dim = cache.shape
    if dim % UNIT or x.type != "F32":
        raise PlanError(f"[SET_ROWS] {node.name}: {x} into {cache}: a {cache.type} cache takes F32 heads of a multiple of {UNIT} values")
    units = x.elements // UNIT
    push = weight_push(cache.type, quants.layout(cache.type, heads * n_ctx, dim), dim)
    choice = ctx.tuning.pick("rows", k=dim, n=pos.elements * heads)
    wg = workgroup_size(ctx.caps, choice["wg_size"], units)
    # In this order, not by Variant.of: kernels that are built ahead are known by it.
    return Dispatch(
        Variant("cache/store_units.comp", ((f"TYPE_{cache.type}", 1), ("WG_SIZE", wg), ("SCALE_WORDS", int(not ctx.caps.storage_16bit)))),
        (Arg(cache, "w"), Arg(x), Arg(pos)),
        pack_push(*push[:3], pos.elements, heads, n_ctx),
        spread(ceil_div(units, wg)),
        node.op,
        node.name,
        f"{wg} threads: {choice.source}",
        nbytes=nbytes(x) + units * quants.row_bytes(cache.type, UNIT),
    )


def stored_tolerance(kind: str) -> Tolerance:
    """Of values stored as a type other than F16 against those that `as_stored` gives."""
    if kind == "F32":
        return Tolerance(1e-10, 1e-4, "stored as they are; norm and RoPE before, in f32, are off by 1e-6 of a value")
    step = {"Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
    return Tolerance(
        1e-6 + 2e-2 * step * step,
        2.2 * step,
        "scales are rounded to F16 either way (2^-11), and a value on the edge between two levels may go to the other, one in a hundred",
    )

"""Quantized KV caches (shaders/cache): rows stored by SET_ROWS, and CACHE_TO_F16, which attention reads them through.

    CACHE_TO_F16  cache Q8_0 or Q4_0 [heads, n_ctx, head_dim], pos I32 [n] -> F16 of its shape
                  params: window (0: none). Rows that no token of the batch sees are left as they are

A cache lies as weights do (docs/architecture.md), its rows being those of all heads. vkback/plan/caches.py puts CACHE_TO_F16 before
attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    Tolerance,
    ceil_div,
    moves_values,
    nbytes,
    pack_push,
    register,
    spread,
    weight_push,
)
from vkback.ops.code_books import decoder
from vkback.ops.workgroup import workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

QUANTIZED = ("Q8_0", "Q4_0")
"""Types that rows are stored in on the device, beside F16."""


def as_stored(kind: str, values: Array) -> Array:
    """Values as a cache of a type holds them, float32."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    return quants.decode(kind, quants.encode(kind, rows)).reshape(values.shape)


def store_units(node: Node, ctx: LowerContext) -> Dispatch:
    """The dispatch of a SET_ROWS into a quantized cache."""
    x, pos, cache = node.inputs
    heads, n_ctx, dim = cache.shape
    if dim % UNIT or x.type != "F32":
        raise PlanError(
            f"[SET_ROWS] {node.name}: {x} into {cache}: a {cache.type} cache takes F32 heads of a multiple of {UNIT} values"
        )
    units = x.elements // UNIT
    push = weight_push(cache.type, quants.layout(cache.type, heads * n_ctx, dim), dim)
    choice = ctx.tuning.pick("rows", k=dim, n=pos.elements * heads)
    wg = workgroup_size(ctx.caps, choice["wg_size"], units)
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
    """Of values stored as a type against those that `as_stored` gives."""
    step = {"Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
    return Tolerance(
        1e-6 + 2e-2 * step * step, 2.2 * step,
        "scales are rounded to F16 either way (2^-11), and a value on the edge between two levels may go to the other, one in a hundred",
    )  # fmt: skip


@register
class CacheToF16(Op):
    """See the module's text."""

    name = "CACHE_TO_F16"
    weight_type = "type"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.asarray(inputs[0], np.float64)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        cache, pos = node.inputs
        y = node.outputs[0]
        heads, n_ctx, dim = cache.shape
        if cache.type not in QUANTIZED or dim % UNIT or y.type != "F16" or y.shape != cache.shape:
            raise PlanError(f"[{self.name}] {node.name}: {cache} to {y}: expected {' or '.join(QUANTIZED)} in whole units to F16")
        units = cache.elements // UNIT
        choice = ctx.tuning.pick("rows", k=dim, n=heads * n_ctx)
        wg = workgroup_size(ctx.caps, choice["wg_size"], units)
        defines = {"WG_SIZE": wg, **decoder(cache.type, ctx.caps)}
        return [
            Dispatch(
                Variant("cache/to_f16.comp", tuple(sorted(defines.items()))),
                (Arg(cache), Arg(pos), Arg(y, "w")),
                pack_push(
                    *weight_push(cache.type, quants.layout(cache.type, heads * n_ctx, dim), dim), heads, n_ctx, pos.elements,
                    int(node.params.get("window", 0)),
                ),
                spread(ceil_div(units, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=nbytes(cache) + nbytes(y),
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(5e-7, 3e-3, "stored as f16; Vulkan lets packHalf2x16 round either way: errors up to 2^-10, NMSE 2^-20 / 3")

    def cases(self) -> Iterator[Case]:
        for kind in QUANTIZED:
            yield self.build_case(kind, (2, 9, 64))
            yield self.build_case(kind, (3, 33, 96))

    def full_cases(self) -> Iterator[Case]:
        for kind in QUANTIZED:
            for shape in ((1, 1, 32), (8, 500, 128), (2, 77, 256)):
                yield self.build_case(kind, shape)

    def build_case(self, type: str, ne: tuple[int, int, int], seed: int = 29) -> Case:
        """ne: heads, rows, head size; one token at the last row sees them all."""

        def make(rng: np.random.Generator) -> Problem:
            cache, pos = Tensor("cache", type, ne, "state"), Tensor("pos", "I32", (1,), "input")
            values = quants.random_blocks(type, prod(ne[:2]), ne[2], rng, std=0.5)
            node = Node(self.name, (cache, pos), (Tensor("y", "F16", ne),))
            return Problem(node, {"cache": values, "pos": np.array([ne[1] - 1], np.int32)})

        return Case(self.name, {"type": type, "ne": ne, "seed": seed}, make, seed)

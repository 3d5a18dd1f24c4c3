"""GET_ROWS and SET_ROWS (shaders/rows)."""

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
    declare,
    nbytes,
    pack_push,
    register,
    shards,
    spread,
)
from vkback.ops.code_books import decoder
from vkback.ops.mat_vec import QUANTS, weight, weight_push
from vkback.ops.reference import REFERENCES
from vkback.ops.workgroup import Defines, workgroup_size
from vkback.shader import Variant

declare("rows", match={"k": "number", "n": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

F16_TOLERANCE = Tolerance(5e-7, 3e-3, "stored as f16; Vulkan lets packHalf2x16 round either way: errors up to 2^-10, NMSE 2^-20 / 3")


def set_rows(x: Array, pos: Array, cache: Array) -> Array:
    """The reference of SET_ROWS; positions beyond the cache store nothing, as -1 does."""
    return REFERENCES["SET_ROWS"]([x, np.where(pos < cache.shape[1], pos, -1), cache], {})[0]


@register
class SetRows(Op):
    """SET_ROWS(x F32 [n, heads, d], pos I32 [n], cache F16 [heads, n_ctx, d]) -> cache, written in place; d is even."""

    name = "SET_ROWS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [set_rows(*inputs)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, pos, cache = node.inputs
        heads, n_ctx, dim = cache.shape
        n = pos.elements
        if dim % 2 or x.elements != n * heads * dim or cache.type != "F16":
            raise PlanError(f"[SET_ROWS] {node.name}: {x} into {cache}: expected an F16 cache of even rows, {n} tokens of its heads")
        words = x.elements // 2
        choice = ctx.tuning.pick("rows", k=dim, n=n * heads)
        wg = workgroup_size(ctx.caps, choice["wg_size"], words)
        return [
            Dispatch(
                Variant("rows/set_rows.comp", (("WG_SIZE", wg),), (), None),
                (Arg(x), Arg(pos), Arg(cache, "w")),
                pack_push(n, heads, dim // 2, n_ctx),
                spread(ceil_div(words, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=nbytes(x) + x.elements * 2,
            )
        ]

    def cases(self) -> Iterator[Case]:
        for n, heads, dim, pos in ((1, 8, 128, (5,)), (3, 2, 64, (0, 7, 3)), (4, 1, 6, (15, -1, 2, 16)), (2, 3, 80, (-1, -1))):
            yield self.case(n, heads, dim, pos)

    def case(self, n: int, heads: int, dim: int, pos: Sequence[int], *, seed: int = 19) -> Case:
        """A cache of 16 positions that holds values already."""

        def make(rng: np.random.Generator) -> Problem:
            cache = Tensor("cache", "F16", (heads, 16, dim), "state")
            node = Node("SET_ROWS", (Tensor("x", "F32", (n, heads, dim), "input"), Tensor("pos", "I32", (n,), "input"), cache), (cache,))
            return Problem(node, {
                "x": rng.uniform(-1, 1, (n, heads, dim)).astype(np.float32),
                "pos": np.array(pos, np.int32),
                "cache": rng.uniform(-1, 1, cache.shape).astype(np.float16),
            })

        return Case("SET_ROWS", {"ne": (n, heads, dim), "pos": tuple(pos), "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return F16_TOLERANCE


@register
class GetRows(Op):
    """GET_ROWS(table [rows, k], ids I32 [n]) -> F32 [n, k]; the table is a weight of any type or F32; an id outside it gives zeros."""

    name = "GET_ROWS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        table, ids = inputs
        inside = (ids >= 0) & (ids < len(table))
        rows = REFERENCES["GET_ROWS"]([table, np.where(inside, ids, 0)], params)[0]
        return [np.where(inside[:, None], rows, 0.0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        table, ids = node.inputs
        y = node.outputs[0]
        k, n = table.shape[-1], ids.elements
        if table.kind != "weight":
            return [self._plain(node, ctx)]
        units = ceil_div(k, 32)
        choice = ctx.tuning.pick("rows", k=k, n=n)
        wg = workgroup_size(ctx.caps, choice["wg_size"], units * n)
        defines: Defines = {"WG_SIZE": wg, **decoder(table.type, ctx.caps), "WIDTH": 4 if k % 4 == 0 else 1}
        parts = shards(table, ctx.caps)
        rows = prod(table.shape[:-1])
        return [
            Dispatch(
                Variant("rows/get_rows.comp", tuple(sorted(defines.items())), (), None),
                (Arg(table, "r", i), Arg(ids), Arg(y, "w", part=f"rows of shard {i}" if len(parts) > 1 else "")),
                pack_push(*weight_push(table.type, part.layout, k), n, k, part.row0, part.rows, rows),
                spread(ceil_div(units * n, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=n * quants.row_bytes(table.type, k) + nbytes(y),
            )
            for i, part in enumerate(parts)
        ]

    def _plain(self, node: Node, ctx: LowerContext) -> Dispatch:
        table, ids = node.inputs
        y = node.outputs[0]
        if table.type != "F32":
            raise PlanError(f"[GET_ROWS] {node.name}: {table} is no weight, so it must be F32")
        k, n = table.shape[-1], ids.elements
        width = 4 if k % 4 == 0 else 1
        choice = ctx.tuning.pick("rows", k=k, n=n)
        wg = workgroup_size(ctx.caps, choice["wg_size"], n * k // width)
        return Dispatch(
            Variant("rows/get_rows_f32.comp", (("WG_SIZE", wg), ("WIDTH", width)), (), None),
            (Arg(table), Arg(ids), Arg(y, "w")),
            pack_push(n, k // width, prod(table.shape[:-1])),
            spread(ceil_div(n * k // width, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=2 * nbytes(y),
        )

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            yield self.case(quant, 9, 512, (8, 0, 3))
        for quant in ("F32", "F16", "Q8_0"):
            yield self.case(quant, 5, 96 if quant == "Q8_0" else 70, (4, -1, 5, 2, 2))
        yield self.case("Q4_K", 1000, 256, tuple(range(0, 1000, 31)))
        yield self.case("F32", 5, 70, (4, -1, 5, 2, 2), kind="input")
        yield self.case("F32", 7, 33, (6, 0), kind="input")

    def case(self, quant: str, rows: int, k: int, ids: Sequence[int], *, kind: str = "weight", seed: int = 23) -> Case:
        """A table of random blocks."""

        def make(rng: np.random.Generator) -> Problem:
            table = weight("table", quant, (rows, k)) if kind == "weight" else Tensor("table", quant, (rows, k), "input")
            node = Node("GET_ROWS", (table, Tensor("ids", "I32", (len(ids),), "input")), (Tensor("y", "F32", (len(ids), k)),))
            values: dict[str, Array] = {"ids": np.array(ids, np.int32)}
            if kind == "weight":
                values["table"] = quants.random_blocks(quant, rows, k, rng, std=0.5)
            else:
                values["table"] = rng.uniform(-1, 1, (rows, k)).astype(np.float32)
            return Problem(node, values)

        return Case("GET_ROWS", {"type": quant, "n": k, "m": rows, "r": len(ids), "kind": kind, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "a multiplication and a subtraction in f32 of numbers that a file's block holds exactly")

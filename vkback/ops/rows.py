"""GET_ROWS and SET_ROWS (shaders/rows)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
    Shape,
    Tolerance,
    ceil_div,
    declare,
    moves_values,
    nbytes,
    pack_push,
    register,
    shards,
    spread,
    weight_push,
)
from vkback.ops.case_line import CaseLineError, unseeded
from vkback.ops.code_books import decoder
from vkback.ops.cost import Cost
from vkback.ops.mat_vec import QUANTS, weight
from vkback.ops.view import View
from vkback.ops.workgroup import Defines, workgroup_size
from vkback.shader import Variant

declare("rows", match={"k": "number", "n": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

F16_TOLERANCE = Tolerance(5e-7, 3e-3, "stored as f16; Vulkan lets packHalf2x16 round either way: errors up to 2^-10, NMSE 2^-20 / 3")


def set_rows(x: Array, pos: Array, cache: Array) -> Array:
    """The reference of SET_ROWS: a copy of the cache, of its type, with row pos[i] of every head from x[i]. Positions beyond the cache
    store nothing, as -1 does."""
    out = cache.copy()
    real = (pos >= 0) & (pos < cache.shape[1])
    out[:, pos[real]] = np.swapaxes(x[real], 0, 1)
    return out


@register
class SetRows(Op):
    """SET_ROWS(x F32 or F16 [n, heads, d], pos I32 [n], cache F16 or F32 [heads, n_ctx, d]) -> cache, written in place; d is even."""

    name = "SET_ROWS"
    formula = "x->z"
    arithmetic = moves_values

    def elementary(self, node: Node, n_kv: int) -> list[Node]:
        """The rows as a view of the cache, and a copy of x to them."""
        x, pos, cache = node.inputs
        shape = (cache.shape[0], pos.elements, cache.shape[2])
        rows = Tensor(f"{cache.name} (view)", cache.type, shape)
        whole = View.whole(cache.shape)
        return [
            Node("VIEW", (cache,), (rows,), {"view": View(0, shape, whole.strides)}),
            Node("CPY", (x, rows), (dataclasses.replace(cache, shape=shape),)),
        ]

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        return 0 if tensor.kind == "state" else nbytes(tensor)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        """As many values as x has, of the cache's type."""
        x, _, cache = node.inputs
        return nbytes(cache) // cache.elements * x.elements

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [set_rows(*inputs)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, pos, cache = node.inputs
        heads, n_ctx, dim = cache.shape
        n = pos.elements
        if dim % 2 or x.elements != n * heads * dim or not {x.type, cache.type} <= {"F32", "F16"}:
            raise PlanError(f"[SET_ROWS] {node.name}: {x} into {cache}: expected a F16 or F32 cache of even rows, {n} tokens of its heads")
        words = x.elements // 2
        choice = ctx.tuning.pick("rows", k=dim, n=n * heads)
        wg = workgroup_size(ctx.caps, choice["wg_size"], words)
        defines = (("FROM_F16", int(x.type == "F16")), ("TO_F16", int(cache.type == "F16")), ("WG_SIZE", wg))
        return [
            Dispatch(
                Variant("rows/set_rows.comp", defines),
                (Arg(x), Arg(pos), Arg(cache, "w")),
                pack_push(n, heads, dim // 2, n_ctx),
                spread(ceil_div(words, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=nbytes(x) + x.elements * (2 if cache.type == "F16" else 4),
            )
        ]

    def cases(self) -> Iterator[Case]:
        for n, heads, dim, pos in ((1, 8, 128, (5,)), (3, 2, 64, (0, 7, 3)), (4, 1, 6, (15, -1, 2, 16)), (2, 3, 80, (-1, -1))):
            yield self.build_case((n, heads, dim), pos)
        for types in (("F32", "F32"), ("F16", "F16"), ("F16", "F32")):
            yield self.build_case((4, 2, 6), (15, -1, 2, 16), *types)

    def full_cases(self) -> Iterator[Case]:
        some: tuple[Shape, ...] = ((0,), (15,), (3, 4, 5), (9, -1, 2), (16, 1), tuple(range(15, -1, -1)))
        for heads, dim, pos in product((1, 2, 8), (2, 6, 40, 64, 80, 128, 256), some):
            yield self.build_case((len(pos), heads, dim), pos)
        few: tuple[Shape, ...] = ((15,), (9, -1, 2), (16, 1))
        for types, dim, pos in product((("F32", "F32"), ("F16", "F16"), ("F16", "F32")), (2, 64, 80, 128), few):
            yield self.build_case((len(pos), 2, dim), pos, *types)

    def build_case(self, ne: tuple[int, int, int], pos: Shape, type_src: str = "F32", type_dst: str = "F16", seed: int = 19) -> Case:
        """ne: tokens, heads, head size; a cache of 16 positions that holds values already."""
        n, heads, dim = ne
        types = type_src, type_dst
        numpy_types = [np.float16 if t == "F16" else np.float32 for t in types]

        def make(rng: np.random.Generator) -> Problem:
            cache = Tensor("cache", type_dst, (heads, 16, dim), "state")
            node = Node("SET_ROWS", (Tensor("x", type_src, (n, heads, dim), "input"), Tensor("pos", "I32", (n,), "input"), cache), (cache,))
            return Problem(node, {
                "x": rng.uniform(-1, 1, (n, heads, dim)).astype(numpy_types[0]),
                "pos": np.array(pos, np.int32),
                "cache": rng.uniform(-1, 1, cache.shape).astype(numpy_types[1]),
            })

        shown = {} if types == ("F32", "F16") else {"type_src": type_src, "type_dst": type_dst}
        return Case("SET_ROWS", {"ne": ne, "pos": pos, **shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return F16_TOLERANCE


@register
class GetRows(Op):
    """GET_ROWS(table [rows, k], ids I32 [n]) -> [n, k]; an id outside the table gives zeros.

    The table is a weight of any type, F32 or F16, and becomes F32, or I32 and stays so. Rows of a weight are multiplied by the param
    `scale`, if there is one.
    """

    name = "GET_ROWS"
    formula = "get_rows(x)"
    weight_type = "type"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fmul": node.outputs[0].elements} if node.params.get("scale", 1.0) != 1.0 else {}

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the table the rows looked up."""
        table, ids = node.inputs
        rows = prod(table.shape[:-1])
        return nbytes(table) // rows * min(rows, ids.elements) if tensor.name == table.name else nbytes(tensor)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        table, ids = inputs
        inside = (ids >= 0) & (ids < len(table))
        rows = np.asarray(table[np.where(inside, ids, 0)], np.float64)
        return [np.where(inside[:, None], rows, 0.0) * params.get("scale", 1.0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        table, ids = node.inputs
        y = node.outputs[0]
        k, n = table.shape[-1], ids.elements
        scale = float(node.params.get("scale", 1.0))
        if table.kind != "weight":
            if scale != 1.0:
                raise PlanError(f"[GET_ROWS] {node.name}: {table} is no weight, its rows cannot be scaled; give SCALE a node of its own")
            return [self._plain(node, ctx)]
        units = ceil_div(k, 32)
        choice = ctx.tuning.pick("rows", k=k, n=n)
        wg = workgroup_size(ctx.caps, choice["wg_size"], units * n)
        defines: Defines = {"WG_SIZE": wg, **decoder(table.type, ctx.caps), "WIDTH": 4 if k % 4 == 0 else 1}
        parts = shards(table, ctx.caps)
        rows = prod(table.shape[:-1])
        return [
            Dispatch(
                Variant("rows/get_rows.comp", tuple(sorted(defines.items()))),
                (Arg(table, "r", i), Arg(ids), Arg(y, "w", part=f"rows of shard {i}" if len(parts) > 1 else "")),
                pack_push(*weight_push(table.type, part.layout, k), n, k, part.row0, part.rows, rows, scale),
                spread(ceil_div(units * n, wg)),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=n * quants.row_bytes(table.type, k) + nbytes(y),
                weight_bytes=n * quants.row_bytes(table.type, k),
            )
            for i, part in enumerate(parts)
        ]

    def _plain(self, node: Node, ctx: LowerContext) -> Dispatch:
        table, ids = node.inputs
        y = node.outputs[0]
        if (table.type, y.type) not in (("F32", "F32"), ("F16", "F32"), ("I32", "I32")):
            raise PlanError(f"[GET_ROWS] {node.name}: {table} to {y}: the table is no weight, so expected F32 or F16 to F32, or I32 to I32")
        k, n = table.shape[-1], ids.elements
        width = 4 if k % 4 == 0 else 1
        choice = ctx.tuning.pick("rows", k=k, n=n)
        wg = workgroup_size(ctx.caps, choice["wg_size"], n * k // width)
        return Dispatch(
            Variant("rows/get_rows_values.comp", (("FROM_F16", int(table.type == "F16")), ("WG_SIZE", wg), ("WIDTH", width))),
            (Arg(table), Arg(ids), Arg(y, "w")),
            pack_push(n, k // width, prod(table.shape[:-1])),
            spread(ceil_div(n * k // width, wg)),
            node.op,
            node.name,
            f"{wg} threads: {choice.source}",
            nbytes=nbytes(y) * (3 if table.type == "F16" else 4) // 2,
        )

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            yield self.rows_case(quant, 9, 512, (8, 0, 3))
        for quant in ("Q6_K", "Q8_0"):
            yield self.rows_case(quant, 9, 512, (8, -1, 3), scale=33.94)
        for quant in ("F32", "F16", "Q8_0"):
            yield self.rows_case(quant, 5, 96 if quant == "Q8_0" else 70, (4, -1, 5, 2, 2))
        yield self.rows_case("Q4_K", 1000, 256, tuple(range(0, 1000, 31)))
        yield self.rows_case("F32", 5, 70, (4, -1, 5, 2, 2), kind="input")
        yield self.rows_case("F32", 7, 33, (6, 0), kind="input")
        for kind in ("F16", "I32"):
            for k in (33, 64):
                yield self.rows_case(kind, 7, k, (6, 7, 0), kind="input")

    def full_cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            for k, (r, ids) in product((256, 768, 4096), ((1, "spread"), (7, "spread"), (33, "one"), (8, "outside"))):
                yield self.build_case(quant, k, 100, r, ids)
            if quant in ("F32", "F16", "BF16"):
                for k in (1, 33, 70, 80):
                    yield self.build_case(quant, k, 9, 4, "spread")
        for k, (r, ids) in product((1, 32, 33, 70, 256, 4096), ((1, "spread"), (7, "spread"), (8, "outside"))):
            for type in ("F32", "F16", "I32"):
                yield self.build_case(type, k, 100, r, ids, "input")

    def perf_cases(self) -> Iterator[Case]:
        for quant in ("Q4_K", "Q6_K", "F16"):
            yield self.build_case(quant, 4096, 32000, 1, "spread")

    def case(self, params: Mapping[str, Any]) -> Case:
        """Lines of the quick set do not name the rows: without `ids` the case is one of those."""
        for own in self.cases() if "ids" not in params else ():
            if unseeded(own.params) == unseeded(params):
                return own.reseeded(params["seed"]) if "seed" in params else own
        return super().case(params)

    def build_case(self, type: str, n: int, m: int, r: int, ids: str, kind: str = "weight", scale: float = 1.0, seed: int = 23) -> Case:
        """r rows of a table [m, n], of a weight times scale. ids: "spread" over all rows, "one" row again and again, or some of them
        "outside" the table."""
        chosen = {
            "spread": [round(i * (m - 1) / max(r - 1, 1)) for i in range(r)][::-1],
            "one": [m - 1] * r,
            "outside": [(-1, m, 0, m - 1)[i % 4] for i in range(r)],
        }
        if ids not in chosen:
            raise CaseLineError(f"ids={ids}: expected one of {', '.join(chosen)}")
        case = self.rows_case(type, m, n, tuple(chosen[ids]), kind=kind, scale=scale, seed=seed)
        return dataclasses.replace(case, params={**unseeded(case.params), "ids": ids, "seed": seed})

    def unfused(self, node: Node) -> list[Node]:
        if "scale" not in node.params:
            return []
        plain = Tensor(f"{node.name}.plain", "F32", node.outputs[0].shape)
        return [Node(self.name, node.inputs, (plain,)), Node("SCALE", (plain,), node.outputs, {"scale": node.params["scale"], "bias": 0.0})]

    def rows_case(
        self, quant: str, rows: int, k: int, ids: Sequence[int], *, kind: str = "weight", scale: float = 1.0, seed: int = 23
    ) -> Case:
        """These rows of a table of random blocks, or with kind "input" of a tensor that is no weight."""

        def make(rng: np.random.Generator) -> Problem:
            table = weight("table", quant, (rows, k)) if kind == "weight" else Tensor("table", quant, (rows, k), "input")
            y = Tensor("y", "I32" if quant == "I32" else "F32", (len(ids), k))
            params = {} if scale == 1.0 else {"scale": scale}
            node = Node("GET_ROWS", (table, Tensor("ids", "I32", (len(ids),), "input")), (y,), params)
            values: dict[str, Array] = {"ids": np.array(ids, np.int32)}
            if kind == "weight":
                values["table"] = quants.random_blocks(quant, rows, k, rng, std=0.5)
            elif quant == "I32":
                values["table"] = rng.integers(-(2**31), 2**31, (rows, k)).astype(np.int32)
            else:
                values["table"] = rng.uniform(-1, 1, (rows, k)).astype(np.float16 if quant == "F16" else np.float32)
            return Problem(node, values)

        shown = {} if scale == 1.0 else {"scale": scale}
        return Case("GET_ROWS", {"type": quant, "n": k, "m": rows, "r": len(ids), "kind": kind, **shown, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "two multiplications and a subtraction in f32 of numbers that a file's block holds exactly")

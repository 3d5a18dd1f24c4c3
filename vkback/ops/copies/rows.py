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
from vkback.ops.cache import QUANTIZED, as_stored, store_units, stored_tolerance
from vkback.ops.case import Array, Case, Problem, Rounded, Shape, Tolerance
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.codebooks import decoder_of
from vkback.ops.copies import set_rows as strided_rows
from vkback.ops.cost import Cost
from vkback.ops.dispatch import FEW, Arg, Dispatch, ceil_div
from vkback.ops.family import declare
from vkback.ops.general import copy_dispatch, rounded_to, views_of
from vkback.ops.ggml_words import one_of_types, sized, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import QUANTS, weight
from vkback.ops.op import OPS, Op, Tape, moves_values, register
from vkback.ops.storage import VALUE_BYTES, nbytes, shards, weight_push
from vkback.ops.view import View
from vkback.ops.workgroup import Defines

declare("rows", match={"k": "number", "n": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

F16_TOLERANCE = Tolerance(5e-7, 3e-3, "stored as f16; Vulkan lets packHalf2x16 round either way: errors up to 2^-10, NMSE 2^-20 / 3")


def set_rows(x: Array, pos: Array, cache: Array) -> Array:
    """The reference of SET_ROWS: a copy of the cache, of its type, with row pos[i] of every head from x[i]. Positions beyond the cache
    store nothing, as -1 does."""
    out = cache.copy()
    real = (pos >= 0) & (pos < cache.shape[1])
    with np.errstate(over="ignore"):  # beyond the range of F16: infinite here, NaN on a device
        out[:, pos[real]] = np.swapaxes(x[real], 0, 1)
    return out


def stored_rows(params: Mapping[str, Any], pos: Array, rows: Sequence[Array], caches: Sequence[Array]) -> list[Array]:
    """Caches of K and, if there are two, of V with rows stored, as the params type_k and type_v say; F16 without them."""
    kinds = (params.get("type_k"), params.get("type_v"))
    return [set_rows(as_stored(kind, x) if kind else x, pos, cache) for x, cache, kind in zip(rows, caches, kinds, strict=False)]


def stores_of(rows: Sequence[Tensor], pos: Tensor, caches: Sequence[Tensor]) -> list[Node]:
    """SET_ROWS of each cache."""
    return [
        Node("SET_ROWS", (x, pos, cache), (cache,), {} if cache.type == "F16" else {"type": cache.type})
        for x, cache in zip(rows, caches, strict=True)
    ]


def staged_rows(name: str, n: int, caches: Sequence[Tensor]) -> Sequence[Tensor]:
    """Where a kernel writes new rows of n tokens: into the caches themselves, or, where one is not F16, as F32 beside them."""
    if all(cache.type == "F16" for cache in caches):
        return caches
    return [Tensor(f"{name}.{cache.name}", "F32", (n, cache.shape[0], cache.shape[2])) for cache in caches]


def store_staged_rows(rows: Sequence[Tensor], pos: Tensor, caches: Sequence[Tensor], ctx: LowerContext) -> list[Dispatch]:
    """The dispatches that bring what `staged_rows` names into the caches."""
    return [] if rows is caches else [d for node in stores_of(rows, pos, caches) for d in OPS["SET_ROWS"].lower(node, ctx)]


def cache_tolerance(node: Node) -> Tolerance:
    """Of what a node stores into caches."""
    kinds = [t.type for t in node.outputs if t.kind == "state"]
    return max((F16_TOLERANCE if kind == "F16" else stored_tolerance(kind) for kind in kinds), key=lambda t: t.nmse)


@register
class SetRows(Op):
    """SET_ROWS(x F32 or F16 [n, heads, d], pos I32 [n], cache F16 or F32 [heads, n_ctx, d]) -> cache, written in place; d is even.

    A cache of the type that the param `type` names is quantized (vkback/ops/cache.py); x is then F32. With a cache of four axes it is
    ggml's: see vkback/ops/copies/set_rows.py.
    """

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
        return nbytes(cache) * x.elements // cache.elements

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, pos, cache = inputs
        if cache.ndim == 4:
            return [strided_rows.reference(x, pos, cache)]
        return [set_rows(as_stored(params["type"], x) if "type" in params else x, pos, cache)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, pos, cache = node.inputs
        if len(cache.shape) == 4:
            return strided_rows.lower(node, ctx)
        if cache.type in QUANTIZED:
            return [store_units(node, ctx)]
        heads, n_ctx, dim = cache.shape
        n = pos.elements
        if dim % 2 or x.elements != n * heads * dim or not {x.type, cache.type} <= {"F32", "F16"}:
            raise PlanError(f"[SET_ROWS] {node.name}: {x} into {cache}: expected a F16 or F32 cache of even rows, {n} tokens of its heads")
        words = x.elements // 2
        choice = ctx.tuning.pick("rows", k=dim, n=n * heads)
        defines = {"FROM_F16": int(x.type == "F16"), "TO_F16": int(cache.type == "F16")}
        return [
            by_threads(
                node,
                ctx,
                "rows/set_rows.comp",
                (Arg(x), Arg(pos), Arg(cache, "w")),
                (n, heads, dim // 2, n_ctx),
                words,
                defines,
                choice=choice,
                moved=nbytes(x) + x.elements * (2 if cache.type == "F16" else 4),
                spins_on=[x] if x.type == "F32" and n <= FEW else None,  # words of F16 may be SENTINEL
            )
        ]

    def cases(self) -> Iterator[Case]:
        for n, heads, dim, pos in ((1, 8, 128, (5,)), (3, 2, 64, (0, 7, 3)), (4, 1, 6, (15, -1, 2, 16)), (2, 3, 80, (-1, -1))):
            yield self.build_case((n, heads, dim), pos)
        for kind in ("F16", "F32"):
            yield self.build_case((4, 1, 6), (15, -1, 2, 16), "F32", kind).where(sync="sentinel")
        for types in (("F32", "F32"), ("F16", "F16"), ("F16", "F32")):
            yield self.build_case((4, 2, 6), (15, -1, 2, 16), *types)
        for kind in QUANTIZED:
            yield self.build_case((4, 2, 96), (15, -1, 2, 16), "F32", kind)
        for kind, first in (("F16", 1e6), ("F32", 1e30), ("Q8_0", 1e8), ("Q4_0", 1e7)):
            yield self.build_case((3, 2, 96), (15, 1, 2), "F32", kind, first)
        yield from strided_rows.cases()

    def full_cases(self) -> Iterator[Case]:
        some: tuple[Shape, ...] = ((0,), (15,), (3, 4, 5), (9, -1, 2), (16, 1), tuple(range(15, -1, -1)))
        for heads, dim, pos in product((1, 2, 8), (2, 6, 40, 64, 80, 128, 256), some):
            yield self.build_case((len(pos), heads, dim), pos)
        few: tuple[Shape, ...] = ((15,), (9, -1, 2), (16, 1))
        for types, dim, pos in product((("F32", "F32"), ("F16", "F16"), ("F16", "F32")), (2, 64, 80, 128), few):
            yield self.build_case((len(pos), 2, dim), pos, *types)
        for kind, dim, pos in product(QUANTIZED, (32, 64, 128), few):
            yield self.build_case((len(pos), 2, dim), pos, "F32", kind)
        yield from strided_rows.full_cases()

    def build_case(
        self, ne: tuple[int, int, int], pos: Shape, type_src: str = "F32", type_dst: str = "F16", first: float = 1.0, seed: int = 19
    ) -> Case:
        """ne: tokens, heads, head size; a cache of 16 positions that holds values already. first: times which the first token's values are
        as large as the others', perhaps beyond the cache's range."""
        n, heads, dim = ne
        types = type_src, type_dst
        numpy_types = [np.float16 if t == "F16" else np.float32 for t in types]

        def make(rng: np.random.Generator) -> Problem:
            cache = Tensor("cache", type_dst, (heads, 16, dim), "state")
            quantized = type_dst in QUANTIZED
            inputs = Tensor("x", type_src, (n, heads, dim), "input"), Tensor("pos", "I32", (n,), "input"), cache
            node = Node("SET_ROWS", inputs, (cache,), {"type": type_dst} if quantized else {})
            before = rng.uniform(-1, 1, cache.shape).astype(numpy_types[1])
            return Problem(
                node,
                {
                    "x": (rng.uniform(-1, 1, (n, heads, dim)) * np.where(np.arange(n) > 0, 1.0, first)[:, None, None]).astype(
                        numpy_types[0]
                    ),
                    "pos": np.array(pos, np.int32),
                    "cache": quants.encode(type_dst, before.astype(np.float32).reshape(-1, dim)) if quantized else before,
                },
            )

        shown = {} if types == ("F32", "F16") else {"type_src": type_src, "type_dst": type_dst}
        size = {"first": first} if first != 1.0 else {}
        return Case("SET_ROWS", {"ne": ne, "pos": pos, **shown, **size, "seed": seed}, make, seed)

    def case(self, params: Mapping[str, Any]) -> Case:
        """A line of test-backend-ops, which has row ids of a type, is one of a cache of four axes."""
        if "type_idx" in params:
            return call_with(
                strided_rows.set_rows_case, params, op=self.name, extra_keys=(), example=lambda: strided_rows.set_rows_case().line
            )
        return super().case(params)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        cache = node.inputs[2]
        if len(cache.shape) == 4:
            return strided_rows.tolerance(node)
        return F16_TOLERANCE if cache.type == "F16" else stored_tolerance(cache.type)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        return strided_rows.rounded(inputs, node) if len(node.inputs[2].shape) == 4 else None


@register
class GetRows(Op):
    """GET_ROWS(table [..., rows, k], ids I32 [n]) -> [n, k]; an id outside the table gives zeros.

    The table is a weight of any type, F32 or F16, and becomes F32, or I32 and stays so. Rows of a weight are multiplied by the param
    `scale`, if there is one.

    With the param `part` (first row, rows, first column, columns) the table is a batch [outer, inner, table rows, table columns] of
    matrices, each that part of its own; ids [outer, inner, n], which may be a view (`views`), count rows of the part; y is
    [outer, inner, n, columns].
    """

    name = "GET_ROWS"
    formula = "get_rows(x)"
    weight_type = "type"

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """Sums by id."""
        if node.params:
            return super().backward(node, dy, tape)
        table, ids = node.inputs
        return [tape.emit("GET_ROWS_BACK", table, (dy, ids), rows=table.shape[0]) if tape.wants(table) else None, None]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fmul": node.outputs[0].elements} if node.params.get("scale", 1.0) != 1.0 else {}

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the table the rows looked up."""
        table, ids = node.inputs
        rows = prod(table.shape[:-1])
        return nbytes(table) // rows * min(rows, ids.elements) if tensor.name == table.name else nbytes(tensor)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        table, ids = inputs
        if "part" in params:
            row, rows, column, columns = params["part"]
            part = table[..., row : row + rows, column : column + columns]
            found = np.take_along_axis(part, np.clip(ids, 0, rows - 1)[..., None], axis=-2)
            return [np.where(((ids >= 0) & (ids < rows))[..., None], found, 0)]
        table = np.reshape(table, (-1, np.shape(table)[-1]))
        inside = (ids >= 0) & (ids < len(table))
        rows = np.asarray(table[np.where(inside, ids, 0)], np.float64)
        return [np.where(inside[:, None], rows, 0.0) * params.get("scale", 1.0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if "part" in node.params:
            return self._of_batch(node, ctx)
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
        defines: Defines = {**decoder_of(table.type, k, ctx), "WIDTH": 4 if k % 4 == 0 else 1}
        parts = shards(table, ctx.caps)
        rows = prod(table.shape[:-1])
        return [
            by_threads(
                node,
                ctx,
                "rows/get_rows.comp",
                (Arg(table, "r", i), Arg(ids), Arg(y, "w", part=f"rows of shard {i}" if len(parts) > 1 else "")),
                (*weight_push(table.type, part.layout, k), n, k, part.row0, part.rows, rows, scale),
                units * n,
                defines,
                choice=choice,
                moved=n * quants.row_bytes(table.type, k) + nbytes(y),
                weight_bytes=n * quants.row_bytes(table.type, k),
            )
            for i, part in enumerate(parts)
        ]

    def _of_batch(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        """Ids into all rows of the table, then rows of all its columns; some columns are cut out in the end. A table that no kernel takes
        becomes F32 before."""
        table, ids = node.inputs
        y = node.outputs[0]
        row, rows, column, columns = node.params["part"]
        outer, inner, table_rows, k = table.shape
        view = views_of(node.params).get(1, View.whole(ids.shape))
        before: list[Dispatch] = []
        if table.kind != "weight" and table.type not in ("F32", "F16", "I32"):
            plain = Tensor(f"{node.name}.table", "F32", table.shape)
            before.append(copy_dispatch(table, plain, node, ctx))
            table = plain
        all_ids = Tensor(f"{node.name}.ids", "I32", view.shape)
        choice = ctx.tuning.pick("rows", k=1, n=all_ids.elements)
        n = view.shape[-1]
        before.append(
            by_threads(
                node,
                ctx,
                "rows/batch_ids.comp",
                (Arg(ids), Arg(all_ids, "w")),
                (outer, inner, n, view.offset, *view.strides, row, rows, table_rows),
                all_ids.elements,
                choice=choice,
                moved=2 * nbytes(all_ids),
            )
        )
        flat = dataclasses.replace(table, shape=(outer * inner * table_rows, k))
        wide = y if columns == k else Tensor(f"{node.name}.rows", y.type, (*view.shape, k))
        found = self.lower(Node(node.op, (flat, all_ids), (wide,)), ctx)
        for d in found:
            args = (dataclasses.replace(a, tensor=table) if a.tensor.name == table.name else a for a in d.args)
            before.append(dataclasses.replace(d, args=tuple(args)))
        if columns != k:
            cut = View(column, (outer, inner, n, columns), (inner * n * k, n * k, k, 1))
            before.append(copy_dispatch(wide, y, node, ctx, source=cut))
        return before

    def _plain(self, node: Node, ctx: LowerContext) -> Dispatch:
        table, ids = node.inputs
        y = node.outputs[0]
        if (table.type, y.type) not in (("F32", "F32"), ("F16", "F32"), ("I32", "I32")):
            raise PlanError(f"[GET_ROWS] {node.name}: {table} to {y}: the table is no weight, so expected F32 or F16 to F32, or I32 to I32")
        k, n = table.shape[-1], ids.elements
        width = 4 if k % 4 == 0 else 1
        choice = ctx.tuning.pick("rows", k=k, n=n)
        return by_threads(
            node,
            ctx,
            "rows/get_rows_values.comp",
            (Arg(table), Arg(ids), Arg(y, "w")),
            (n, k // width, prod(table.shape[:-1])),
            n * k // width,
            {"FROM_F16": int(table.type == "F16"), "WIDTH": width},
            choice=choice,
            moved=nbytes(y) * (3 if table.type == "F16" else 4) // 2,
        )

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            yield self.build_case(quant, 512, 9, 3, kind="weight")
        for quant in ("Q6_K", "Q8_0"):
            yield self.build_case(quant, 512, 9, 4, ids="outside", scale=33.94)
        for quant in ("F32", "F16", "Q8_0"):
            yield self.build_case(quant, 96 if quant == "Q8_0" else 70, 5, 5, ids="outside", kind="weight")
        yield self.build_case("Q4_K", 256, 1000, 33, ids="spread")
        yield self.build_case("F32", 70, 5, 5, ids="outside")
        yield self.build_case("F32", 33, 7, 2)
        for type, k in product(("F16", "I32"), (33, 64)):
            yield self.build_case(type, k, 7, 4, ids="outside")
        for type in ("F32", "Q4_0", "BF16"):
            yield self.build_case(type, 64, 5, 4, 3, 2, v=True, vs0=True)
            yield self.build_case(type, 64, 5, 4, 1, 2, vs0=True, offset_cols=32, ids="outside")

    def full_cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            for k, (r, ids) in product((256, 768, 4096), ((1, "spread"), (7, "spread"), (33, "one"), (8, "outside"))):
                yield self.build_case(quant, k, 100, r, ids=ids, kind="weight")
            if quant in ("F32", "F16", "BF16"):
                for k in (1, 33, 70, 80):
                    yield self.build_case(quant, k, 9, 4, ids="spread", kind="weight")
            for v, vs0 in product((False, True), repeat=2):
                yield self.build_case(quant, 256, 5, 4, 7, 1, v=v, vs0=vs0)
        for k, (r, ids) in product((1, 32, 33, 70, 256, 4096), ((1, "spread"), (7, "spread"), (8, "outside"))):
            for type in ("F32", "F16", "I32"):
                yield self.build_case(type, k, 100, r, ids=ids)

    def perf_cases(self) -> Iterator[Case]:
        for quant in ("Q4_K", "Q6_K", "F16"):
            yield self.build_case(quant, 4096, 32000, 1, ids="spread", kind="weight")

    def build_case(
        self,
        type: str = "f32",
        n: int = 10,
        m: int = 5,
        r: int = 3,
        be1: int = 1,
        be2: int = 1,
        v: bool = False,
        vs0: bool = False,
        offset_cols: int = 0,
        ids: str = "random",
        kind: str = "",
        scale: float = 1.0,
        seed: int = 23,
    ) -> Case:
        """r rows of each of be1 * be2 tables [m, n], of a weight times scale.

        v            the ids are a view of r // 2 of r + 1
        vs0          the tables are views of larger ones, behind three further rows and, with offset_cols, so many columns
        ids          "random"; "spread" over all rows; the last one again and again ("one"); or some of them "outside" the table
        kind         "weight" or "input": of a stored matrix, or of a tensor that is none; default by the type
        """
        known = one_of_types(type, (*QUANTS, "I32"))
        bare = known in VALUE_BYTES if kind not in ("weight", "input") else kind == "input"
        if kind not in ("", "weight", "input") or (bare and known not in VALUE_BYTES) or (not bare and known == "I32"):
            raise CaseLineError(f"GET_ROWS: kind={kind} of type={type}: expected weight, or of f32, f16, bf16 and i32 input")
        if ids not in ("random", "spread", "one", "outside"):
            raise CaseLineError(f"GET_ROWS: ids={ids}: expected one of random, spread, one, outside")
        if min(n, m, r, be1, be2) < 1 or offset_cols < 0 or (v and r < 2) or (offset_cols and not vs0):
            given = f"n={n}, m={m}, r={r}, be1={be1}, be2={be2}, v={int(v)}, vs0={int(vs0)}, offset_cols={offset_cols}"
            raise CaseLineError(f"GET_ROWS: {given}: expected sizes from 1, r from 2 with v, and offset_cols only with vs0")
        plain = (be1, be2, v, vs0) == (1, 1, False, False)
        if scale != 1.0 and (bare or not plain):
            raise PlanError(f"[GET_ROWS] scale={scale}: only rows of one stored matrix are scaled")
        rows, columns = (m + 3, n + offset_cols) if vs0 else (m, n)
        if not bare:
            try:
                quants.row_bytes(known, columns)
            except quants.QuantShapeError as e:
                raise CaseLineError(f"GET_ROWS: {e}") from e
        table_shape = sized((rows, columns) if plain and not (bare and known == "BF16") else (be2, be1, rows, columns))
        count = r + 1 if v else r
        batch = table_shape[:-2]
        view = View(1, (*batch, r // 2), View.whole((*batch, count)).strides) if v else View.whole((*batch, count))
        sized((*view.shape, columns))

        def make(rng: np.random.Generator) -> Problem:
            table = weight("table", known, table_shape) if not bare else Tensor("table", known, table_shape, "input")
            y = Tensor("y", "I32" if known == "I32" else "F32", (*view.shape, n))
            params: dict[str, Any] = {} if scale == 1.0 else {"scale": scale}
            params |= {"part": (rows - m, m, columns - n, n)} if batch else {}
            params |= {"views": {1: view}} if v else {}
            node = Node("GET_ROWS", (table, Tensor("ids", "I32", (*batch, count), "input")), (y,), params)
            chosen = {
                "spread": [round(i * (m - 1) / max(count - 1, 1)) for i in range(count)][::-1],
                "one": [m - 1] * count,
                "outside": [(-1, m, 0, m - 1)[i % 4] for i in range(count)],
            }
            numbers = rng.integers(0, m, (*batch, count)) if ids == "random" else np.broadcast_to(np.array(chosen[ids]), (*batch, count))
            values: dict[str, Array] = {"ids": np.array(numbers, np.int32)}
            if not bare:
                values["table"] = quants.random_blocks(known, prod(table_shape[:-1]), columns, rng, std=0.5)
            elif known == "I32":
                values["table"] = rng.integers(-(2**31), 2**31, table_shape).astype(np.int32)
            else:
                values["table"] = rounded_to(known, rng.uniform(-1, 1, table_shape))
            return Problem(node, values)

        shown: dict[str, Any] = {
            "type": type_word(known),
            "n": n,
            "m": m,
            "r": r,
            "be1": be1,
            "be2": be2,
            "v": int(v),
            "vs0": int(vs0),
            "offset_cols": offset_cols,
        }
        shown |= {"ids": ids} if ids != "random" else {}
        shown |= {"kind": kind} if kind else {}
        shown |= {"scale": scale} if scale != 1.0 else {}
        return Case("GET_ROWS", {**shown, "seed": seed}, make, seed)

    def unfused(self, node: Node) -> list[Node]:
        if "scale" not in node.params:
            return []
        plain = Tensor(f"{node.name}.plain", "F32", node.outputs[0].shape)
        return [Node(self.name, node.inputs, (plain,)), Node("SCALE", (plain,), node.outputs, {"scale": node.params["scale"], "bias": 0.0})]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "two multiplications and a subtraction in f32 of numbers that a file's block holds exactly")

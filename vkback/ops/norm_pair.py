"""RMS_NORM_PAIR (shaders/norm/norm_pair.comp): two normed rows side by side, as MTP blocks and EAGLE-3 heads read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.codebooks import decoder_of, shared_bytes
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push, spread
from vkback.ops.f16_range import overflow_word
from vkback.ops.ggml_words import one_of_types, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import units_stride
from vkback.ops.matmul.linear_cases import known_type
from vkback.ops.matmul.linear_node import weight
from vkback.ops.norm import MAX_KEPT, TOLERANCE
from vkback.ops.op import OPS, Op, register
from vkback.ops.quantize import Q8_1_TOLERANCE
from vkback.ops.storage import nbytes, shards, weight_push
from vkback.ops.workgroup import Defines, power_of_two, reduction, workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

ROWS = ("", "row", "normed")
"""What a node leaves besides: nothing, the rows of the table, or these normed."""

OUT = {"F32": 0, "Q8_1": 1, "F16": 2}
"""Types of y; F16 in unit order."""


@register
class RmsNormPair(Op):
    """RMS_NORM_PAIR(a F32 [n, dim], wa F32 [dim], table F32 [.., rows, dim], wb F32 [dim], ids I32 [n]; eps, eps_b, keeps) ->
    (y F32 or Q8_1 [n, 2 * dim] [, row F32 [n, dim]]), y = [RMS_NORM(a) * wa, RMS_NORM(b) * wb], where b is GET_ROWS of the table.

    With `embeds` the inputs are (embedding [vocabulary, dim] of any type, wa, table, wb, ids, tokens I32 [n]), and a is GET_ROWS of that.

    params  keeps: "" or what `row` is, "row": b; "normed": its half of y
            embeds, scale: of the embedding's rows; previous: ids is the PREVIOUS of what is given
            units: GemmShape, where y is F16 for products of that shape (gemm_reg.packed_units)
    """

    name = "RMS_NORM_PAIR"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, wa, table, wb, ids, *tokens = inputs
        if tokens:
            (a,) = OPS["GET_ROWS"].reference([a, tokens[0]], {"scale": params.get("scale", 1.0)})
        if params.get("previous"):
            (ids,) = OPS["PREVIOUS"].reference([ids], {})
        b = OPS["GET_ROWS"].reference([table.reshape(-1, table.shape[-1]), ids], {})[0]
        first = OPS["RMS_NORM_MUL"].reference([a, wa], {"eps": params["eps"]})[0]
        second = OPS["RMS_NORM_MUL"].reference([b, wb], {"eps": params["eps_b"]})[0]
        kept = {"": [], "row": [b], "normed": [second]}[params["keeps"]]
        return [np.concatenate([first, second], axis=-1), *kept]

    @staticmethod
    def threads(dim: int, n: int, ctx: LowerContext) -> int:
        """Threads of its workgroups, as many as hold a row in registers; 0 where none can, or a row is no whole units."""
        choice = ctx.tuning.pick("norm", dim=dim, rows=n)
        wg = max(workgroup_size(ctx.caps, max(choice["wg_size"], power_of_two(ceil_div(dim, 4 * MAX_KEPT))), dim // 4), 8)
        return wg if dim % UNIT == 0 and dim // 4 <= wg * MAX_KEPT else 0

    @staticmethod
    def embeds(table: Tensor, n: int, ctx: LowerContext) -> bool:
        """Whether it can take its first rows from an embedding itself: of one shard, where shared memory holds a row."""
        dim = table.shape[-1]
        row = 16 * 8 * (dim // UNIT + 1) + 8 * RmsNormPair.threads(dim, n, ctx) + shared_bytes(table.type, ctx.caps)
        return table.kind == "weight" and len(table.shape) == 2 and len(shards(table, ctx.caps)) == 1 and row <= ctx.caps.max_shared_memory

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, wa, table, wb, ids, *tokens = node.inputs
        y, *kept = node.outputs
        n, dim = ids.elements, a.shape[-1]
        wg = self.threads(dim, n, ctx)
        fit = all(t.type == "F32" for t in (wa, table, wb, *kept)) and y.type in OUT and table.kind != "weight"
        fit = fit and (self.embeds(a, n, ctx) if tokens else a.type == "F32" and a.shape == (n, dim))
        fit = fit and wa.shape == wb.shape == (dim,) and table.shape[-1] == dim
        if not wg or not fit or len(kept) != bool(node.params["keeps"]):
            read, made = (", ".join(map(str, tensors)) for tensors in (node.inputs, node.outputs))
            raise PlanError(f"[{self.name}] {node.name}: {read} to {made}: expected F32 rows of whole units of 32")
        out = OUT[y.type]
        reduce, subgroup = reduction(ctx.caps, wg, lanes=8 if out == OUT["Q8_1"] else 1)
        defines: Defines = {**reduce, "ROUNDS": ceil_div(dim // 4, wg), "OUT": out, "ROW": ROWS.index(node.params["keeps"])}
        args = [*map(Arg, node.inputs[:5]), Arg(y, "w")]
        y_quads, stride, scale = dim // 2, 0, 1.0
        defines |= {"PREVIOUS": int(node.params.get("previous", False))}
        of_embedding: tuple[int | float, ...] = ()
        looked_up = n * quants.row_bytes(a.type, dim) if tokens else 0
        for tensor in tokens:
            defines |= {**decoder_of(a.type, dim, ctx), "UNITS": dim // UNIT, "BIND_TOKENS": len(args)}
            args.append(Arg(tensor))
            (shard,) = shards(a, ctx.caps)
            of_embedding = (*weight_push(a.type, shard.layout, dim), a.shape[0], float(node.params.get("scale", 1.0)))
        for tensor in kept:
            defines["BIND_ROW"] = len(args)
            args.append(Arg(tensor, "w"))
        if out == OUT["F16"]:
            shape: GemmShape = node.params["units"]
            defines |= {"SG": ctx.caps.subgroup_size, "FN": shape.matrix[1], "FK": shape.matrix[2], "ROW_LANES": shape.row_lanes}
            defines["OVERFLOW_BINDING"] = len(args)
            args.append(Arg(overflow_word(y), "rw"))
            y_quads, stride, scale = y.shape[-1] // 4, units_stride(2 * dim, shape, ctx.caps), ctx.f16_scale(y)
        eps, eps_b = float(node.params["eps"]), float(node.params["eps_b"])
        return [
            Dispatch(
                Variant.of(f"norm/norm_pair{'_embedded' if tokens else ''}.comp", defines, subgroup_size=subgroup),
                tuple(args),
                pack_push(*of_embedding, n, dim // 4, prod(table.shape[:-1]), eps, eps_b, y_quads, stride, float(scale)),
                spread(2 * n),
                node.op,
                node.name,
                f"{wg} threads: {ctx.tuning.pick('norm', dim=dim, rows=n).source}" + (", stored as f16 units" if out == OUT["F16"] else ""),
                nbytes=(looked_up or nbytes(a)) + 4 * n * dim + nbytes(wa) + nbytes(wb) + nbytes(y) + sum(map(nbytes, kept)),
                flops=8 * n * dim,
                weight_bytes=looked_up,
                waits=SpinWaits(counted=tuple(t.name for t in (table, ids, *tokens)), also_part=() if tokens else (a.name,), arrives=2 * n),
            )
        ]

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of tables the rows that it takes."""
        a, _, table, _, ids, *tokens = node.inputs
        if tokens and tensor.name == a.name:
            return ids.elements * quants.row_bytes(a.type, a.shape[-1])
        return 4 * ids.elements * table.shape[-1] if tensor.name == table.name else nbytes(tensor)

    def unfused(self, node: Node) -> list[Node]:
        a, wa, table, wb, ids, *tokens = node.inputs
        y, *kept = node.outputs
        before: list[Node] = []
        if tokens:
            embedding, a = a, Tensor(f"{node.name}.a", "F32", (ids.elements, a.shape[-1]))
            scale = {"scale": node.params["scale"]} if node.params.get("scale", 1.0) != 1.0 else {}
            before.append(Node("GET_ROWS", (embedding, *tokens), (a,), scale))
        if node.params.get("previous"):
            pos, ids = ids, Tensor(f"{node.name}.ids", "I32", ids.shape)
            before.append(Node("PREVIOUS", (pos,), (ids,)))
        b, first, second = (Tensor(f"{node.name}.{name}", "F32", a.shape) for name in ("b", "first", "second"))
        b = kept[0] if node.params["keeps"] == "row" else b
        second = kept[0] if node.params["keeps"] == "normed" else second
        both = y if y.type == "F32" else Tensor(f"{node.name}.both", "F32", y.shape)
        rows = Tensor(table.name, table.type, (prod(table.shape[:-1]), table.shape[-1]), table.kind)
        chain = [
            *before,
            Node("GET_ROWS", (rows, ids), (b,)),
            Node("RMS_NORM_MUL", (a, wa), (first,), {"eps": node.params["eps"]}),
            Node("RMS_NORM_MUL", (b, wb), (second,), {"eps": node.params["eps_b"]}),
            Node("CONCAT", (first, second), (both,), {"axis": 1}),
        ]
        return chain if both is y else [*chain, Node("QUANTIZE_Q8_1", (both,), (y,))]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        """That of either norm."""
        return Q8_1_TOLERANCE if node.outputs[0].type == "Q8_1" else TOLERANCE

    def build_case(
        self,
        dim: int = 64,
        n: int = 1,
        rows: int = 7,
        keeps: str = "",
        out: str = "f32",
        embeds: str = "",
        previous: bool = False,
        seed: int = 61,
    ) -> Case:
        """Values uniform in +-1, weights in 0.5..1.5; rows of the table from the last one back, and of several the second is none of them.

        embeds  type of an embedding of nine rows, whose rows come times 1.5
        previous  the rows are said by the positions behind them
        keeps  what it leaves besides y: "" nothing, "row" rows of the table, "normed" these normed
        """
        y_type = one_of_types(out, ("F32", "Q8_1"), "out")
        known = known_type(embeds) if embeds else ""
        if dim < UNIT or dim % UNIT or n < 1 or rows < 1 or keeps not in ROWS:
            kept = ", ".join(ROWS[1:])
            raise CaseLineError(f"dim={dim}, n={n}, rows={rows}, keeps={keeps}: expected whole units of 32, a row, and one of {kept}")

        def make(rng: np.random.Generator) -> Problem:
            a, table = Tensor("a", "F32", (n, dim), "input"), Tensor("table", "F32", (1, rows, dim), "state")
            wa, wb = (Tensor(name, "F32", (dim,), "weight") for name in ("wa", "wb"))
            values: dict[str, Array] = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in (a, table)}
            values |= {t.name: rng.uniform(0.5, 1.5, dim).astype(np.float32) for t in (wa, wb)}
            values["ids"] = np.array([-1 if i == 1 else rows - 1 - i % rows for i in range(n)], np.int32)
            values["ids"] += int(previous)
            if known:
                values |= {"embd": quants.random_blocks(known, 9, dim, rng, std=0.5), "tokens": np.arange(n, dtype=np.int32)[::-1] % 10}
                del values["a"]
                a = weight("embd", known, (9, dim))
            outputs = (Tensor("y", y_type, (n, 2 * dim)), *((Tensor("row", "F32", (n, dim)),) if keeps else ()))
            inputs = (a, wa, table, wb, Tensor("ids", "I32", (n,), "input"), *((Tensor("tokens", "I32", (n,), "input"),) if known else ()))
            params: dict[str, Any] = {"eps": 1e-6, "eps_b": 0.25, "keeps": keeps}
            params |= ({"embeds": True, "scale": 1.5} if known else {}) | ({"previous": True} if previous else {})
            return Problem(Node(self.name, inputs, outputs, params), values)

        shown: dict[str, Any] = {"dim": dim, "n": n, "rows": rows}
        shown |= {"keeps": keeps} if keeps else {}
        shown |= {"out": type_word(y_type)} if y_type != "F32" else {}
        shown |= ({"embeds": type_word(known)} if known else {}) | ({"previous": True} if previous else {})
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(64, 3, keeps="row")
        yield self.build_case(4096, keeps="normed", out="q8_1")
        yield self.build_case(2048, 2, keeps="row", out="q8_1").where(sync="sentinel")
        yield self.build_case(96, 5, 2).where(sync="sentinel")
        yield self.build_case(1024, 11, keeps="row", out="q8_1", embeds="q4_K", previous=True)
        yield self.build_case(256, 2, embeds="iq2_s", previous=True).where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for dim, n, keeps, out in product((32, 96, 2880, 5120), (1, 4), ROWS, ("f32", "q8_1")):
            yield self.build_case(dim, n, keeps=keeps, out=out)
        yield self.build_case(64, 700, 300)
        for quant, dim in product(quants.WEIGHT_TYPES, (256, 4096)):
            yield self.build_case(dim, 2, embeds=quant, out="q8_1" if dim == 4096 else "f32", previous=dim == 4096)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case(4096, n, 1024)

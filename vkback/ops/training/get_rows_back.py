"""GET_ROWS_BACK (shaders/rows/get_rows_back.comp): the gradient of an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.cost import Cost
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.ggml_words import operand, sized, tensor_type, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, register
from vkback.ops.storage import VALUE_BYTES, nbytes
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant


@register
class GetRowsBack(Gradient):
    """GET_ROWS_BACK(dy [n, k] of any type, ids I32 [n]; rows [, scale]) -> F32 [rows, k].

    Rows of dy with the same id add up, in the order of the tokens; ids outside the table count nothing. scale: of the GET_ROWS.
    """

    name = "GET_ROWS_BACK"
    cost: ClassVar[Cost] = {"fadd": 1}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, ids = np.asarray(inputs[0], np.float64), np.asarray(inputs[1]).reshape(-1)
        dy = dy.reshape(len(ids), -1) * params.get("scale", 1.0)
        table = np.zeros((params["rows"], dy.shape[1]))
        inside = (ids >= 0) & (ids < len(table))
        np.add.at(table, ids[inside], dy[inside])
        return [table]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        dy, ids = np.asarray(inputs[0], np.float64), np.asarray(inputs[1]).reshape(-1)
        inside = (ids >= 0) & (ids < params["rows"])
        dy = dy.reshape(len(ids), -1)[inside] * params.get("scale", 1.0)
        return against(dy, lambda table: table[ids[inside]], np.zeros((params["rows"], dy.shape[1])))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, ids = node.inputs
        table = node.outputs[0]
        n, k = ids.elements, table.shape[-1]
        rows = prod(table.shape[:-1])
        if rows != node.params["rows"] or dy.elements != n * k:
            raise PlanError(f"[{self.name}] {node.name}: {dy} by {ids} to {table}: expected {n} rows of {k} values, rows={rows}")
        copies, plain = as_floats(node, ctx, dy)
        zeros = OPS["FILL"].lower(Node("FILL", (), (table,), {"c": 0.0, "shape": table.shape}), ctx)
        choice = ctx.tuning.pick("rows", k=k, n=n)
        wg = workgroup_size(ctx.caps, choice["wg_size"], k)
        defines, subgroup = reduction(ctx.caps, wg)
        gz = ceil_div(n, MAX_GROUPS_X)
        return [
            *copies,
            *zeros,
            Dispatch(
                Variant.of("rows/get_rows_back.comp", defines, subgroup_size=subgroup),
                (Arg(plain), Arg(ids), Arg(table, "rw")),
                pack_push(n, k, rows, float(node.params.get("scale", 1.0))),
                (ceil_div(k, wg), ceil_div(n, gz), gz),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=2 * nbytes(plain),
                flops=n * k,
            ),
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "f32 sums of as many rows as tokens have an id, each 2^-24")

    def build_case(
        self,
        type: str = "f32",
        n: int = 256,
        m: int = 5,
        r: int = 4,
        b: int = 1,
        v: bool = False,
        scale: float = 1.0,
        outside: bool = False,
        seed: int = 23,
    ) -> Case:
        """r rows of n values into a table of m, of batch 1, as a gradient has no other; v: ids are the first half of a tensor; type: of dy.
        outside: some ids are beyond the table."""
        kind = tensor_type(type)
        if min(n, m, r, b) < 1 or (v and r < 2) or (kind not in VALUE_BYTES and n % quants.quant(kind).block_values):
            raise CaseLineError(f"{self.name}: n={n}, m={m}, r={r}, b={b}: expected all above 0, r from 2 with v=1, whole blocks of {type}")
        if b != 1:
            raise PlanError(f"[{self.name}] b={b}: only one table has a gradient")
        tokens = r // 2 if v else r
        sized((m, n))
        sized((r, n))

        def make(rng: np.random.Generator) -> Problem:
            dy, ids = operand("dy", kind, (tokens, n)), Tensor("ids", "I32", (tokens,), "input")
            beyond = 2 * outside
            values = {"dy": numbers(dy, rng, 1.0), "ids": rng.integers(-beyond, m + beyond, tokens).astype(np.int32)}
            params = {"rows": m} | ({"scale": scale} if scale != 1.0 else {})
            return Problem(Node(self.name, (dy, ids), (Tensor("table", "F32", (m, n)),), params), values)

        shown: dict[str, Any] = {"type": type_word(kind), "n": n, "m": m, "r": r, "b": b, "v": int(v)}
        shown |= ({"scale": scale} if scale != 1.0 else {}) | ({"outside": 1} if outside else {})
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(n=37, m=7, r=41, outside=True, scale=1.5)
        yield self.build_case(n=70, m=1000, r=9)
        yield self.build_case("q4_0", n=64, m=3, r=12, v=True)

    def full_cases(self) -> Iterator[Case]:
        for n, m, r in ((1, 8, 2), (576, 300, 200), (5, 2, 1000), (1500, 3, 40)):
            yield self.build_case(n=n, m=m, r=r)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(n=576, m=49152, r=512)

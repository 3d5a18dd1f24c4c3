"""MOE_REDUCE: the weighted sum of a token's experts (shaders/moe).

y F32 [n, n_used, m], weights F32 [n, n_used] [, residual F32 [n, m]] -> F32 [n, m]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.family import POWERS, declare
from vkback.ops.lowering import LowerContext
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

declare("moe_reduce", match={"m": "number", "n": "number", "n_used": "number"}, params={"wg_size": POWERS})


@register
class MoeReduce(Op):
    """See the module's text."""

    name = "MOE_REDUCE"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """A multiply-add for each value of each expert, and the residual's sum."""
        return {"fmul": node.inputs[0].elements} | ({"fadd": node.outputs[0].elements} if len(node.inputs) > 2 else {})

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        y, weights, *residual = (np.asarray(i, np.float64) for i in inputs)
        out = (y * weights[..., None]).sum(axis=1)
        return [out + residual[0]] if residual else [out]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, _ = node.inputs[:2]
        n, n_used, m = y.shape
        choice = ctx.tuning.pick("moe_reduce", m=m, n=n, n_used=n_used)
        width = 4 if m % 4 == 0 else 1
        wg = workgroup_size(ctx.caps, choice["wg_size"], m // width)
        defines = {"WG_SIZE": wg, "USED": n_used, "WIDTH": width, "HAS_RESIDUAL": int(len(node.inputs) > 2)}
        return [
            Dispatch(
                kernel=Variant.of("moe/moe_reduce.comp", defines),
                args=(Arg(node.inputs[0]), Arg(node.inputs[1]), Arg(node.outputs[0], "w"), *(Arg(t) for t in node.inputs[2:])),
                push=pack_push(m // width),
                groups=(ceil_div(m // width, wg), n, 1),
                op=node.op,
                label=node.name,
                reason=choice.source,
                nbytes=sum(nbytes(t) for t in (*node.inputs, *node.outputs)),
                flops=2 * y.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "an f32 sum of at most 32 products: 32 roundings of 6e-8")

    def cases(self) -> Iterator[Case]:
        for seed, (n, n_used, m, residual) in enumerate(
            ((1, 1, 1, False), (1, 8, 2048, True), (3, 4, 30, False), (2, 8, 2880, False), (5, 32, 260, True)), 1
        ):
            yield self.build_case(n, n_used, m, residual, seed)

    def full_cases(self) -> Iterator[Case]:
        for n, used, m, residual in product((1, 3, 33), (1, 2, 8, 32), (1, 33, 768, 2880), (False, True)):
            yield self.build_case(n, used, m, residual)

    def build_case(self, n: int, n_used: int, m: int, residual: bool, seed: int = 1) -> Case:
        """One case with normal values."""

        def make(rng: np.random.Generator) -> Problem:
            shapes: dict[str, tuple[int, ...]] = {"y": (n, n_used, m), "weights": (n, n_used)} | ({"residual": (n, m)} if residual else {})
            inputs = tuple(Tensor(name, "F32", shape) for name, shape in shapes.items())
            values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in inputs}
            return Problem(Node(self.name, inputs, (Tensor("moe_out", "F32", (n, m)),)), values)

        return Case(self.name, {"n": n, "n_used": n_used, "m": m, "residual": residual, "seed": seed}, make, seed)

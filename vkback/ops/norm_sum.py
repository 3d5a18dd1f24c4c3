"""RMS_NORM_SUM (shaders/norm/norm_sum.comp): the sum of two normed rows of one token, one beside what it norms (Gemma 3n's Laurel)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.norm import MAX_KEPT
from vkback.ops.op import OPS, Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import power_of_two, reduction, workgroup_size
from vkback.shader import Variant


@register
class RmsNormSum(Op):
    """RMS_NORM_SUM(a F32 [1, dim], wa F32 [dim], b F32 [1, dim], wb F32 [dim]; eps, scale) -> RMS_NORM(a) * wa + scale * (b + RMS_NORM(b) *
    wb)."""

    name = "RMS_NORM_SUM"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, wa, b, wb = (np.asarray(i, np.float64) for i in inputs)
        first, second = (OPS["RMS_NORM_MUL"].reference(pair, params)[0] for pair in ([a, wa], [b, wb]))
        return [first + params["scale"] * (b + second)]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value two squares, two products with a scale and a weight each, the last scale, and two sums."""
        return {"fmul": 7 * node.outputs[0].elements, "fadd": 2 * node.outputs[0].elements, "fdiv": 2, "sqrt": 2}

    @staticmethod
    def fits(dim: int, ctx: LowerContext) -> int:
        """Threads of its workgroup, as many as hold a row in registers; 0 where none can, or a row is no whole quads."""
        choice = ctx.tuning.pick("norm", dim=dim, rows=1)
        wg = workgroup_size(ctx.caps, max(choice["wg_size"], power_of_two(ceil_div(dim, 2 * MAX_KEPT))), dim // 4)
        return wg if dim % 4 == 0 and dim // 4 <= wg * MAX_KEPT // 2 else 0

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, wa, b, wb = node.inputs
        y = node.outputs[0]
        dim = a.shape[-1]
        wg = self.fits(dim, ctx)
        if not wg or any(t.type != "F32" for t in (*node.inputs, y)) or {t.elements for t in (a, wa, b, wb, y)} != {dim}:
            raise PlanError(
                f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs))} to {y}: expected F32 rows of as many whole quads"
            )
        reduce, subgroup = reduction(ctx.caps, wg)
        args = (*map(Arg, node.inputs), Arg(y, "w"))
        return [
            Dispatch(
                Variant.of("norm/norm_sum.comp", {**reduce, "DIM": dim}, subgroup_size=subgroup),
                args,
                pack_push(float(node.params["eps"]), float(node.params["scale"])),
                (1, 1, 1),
                node.op,
                node.name,
                f"{wg} threads: {ctx.tuning.pick('norm', dim=dim, rows=1).source}",
                nbytes=sum(nbytes(arg.tensor) for arg in args),
                flops=9 * dim,
                waits=SpinWaits(whole=(a.name,), also=(b.name,)),
            )
        ]

    def unfused(self, node: Node) -> list[Node]:
        a, wa, b, wb = node.inputs
        second, both, scaled = (Tensor(f"{node.name}.{name}", "F32", b.shape) for name in ("second", "both", "scaled"))
        eps = {"eps": node.params["eps"]}
        return [
            Node("RMS_NORM_MUL", (b, wb), (second,), eps),
            Node("ADD", (b, second), (both,)),
            Node("SCALE", (both,), (scaled,), {"scale": node.params["scale"], "bias": 0.0}),
            Node("RMS_NORM_MUL_ADD", (a, wa, scaled), node.outputs, eps),
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-4, "f32: two sums of squares and a handful of roundings, each 2^-24; 1/sqrt is allowed 3 ulp")

    def build_case(self, dim: int = 128, scale: float = 0.75, seed: int = 59) -> Case:
        """Values uniform in +-1, weights in 0.5..1.5."""
        if dim < 4 or dim % 4:
            raise CaseLineError(f"dim={dim}: expected whole fours of values")

        def make(rng: np.random.Generator) -> Problem:
            rows = [Tensor(name, "F32", (1, dim), "input") for name in ("a", "b")]
            weights = [Tensor(name, "F32", (dim,), "weight") for name in ("wa", "wb")]
            values: dict[str, Array] = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in rows}
            values |= {t.name: rng.uniform(0.5, 1.5, dim).astype(np.float32) for t in weights}
            inputs = (rows[0], weights[0], rows[1], weights[1])
            return Problem(Node(self.name, inputs, (Tensor("y", "F32", (1, dim)),), {"eps": 1e-6, "scale": scale}), values)

        return Case(self.name, {"dim": dim, "scale": scale, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100)
        yield self.build_case(2048)
        yield self.build_case(2048).where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for dim, scale in product((4, 36, 2560, 3072), (1.0, -0.5)):
            yield self.build_case(dim, scale)

"""MUL_MAT and MUL_MAT_ID: what the graph asks for, as the mat-vec family carries it out (mat_vec, mul_mat_batched)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops import mul_mat_batched as batched
from vkback.ops.base import Array, Case, Dispatch, LowerContext, Op, Problem, Tolerance, register
from vkback.ops.copy import some
from vkback.ops.mat_vec import QUANTS, RARE, MatVec, mul_mat_case, mul_mat_id_case, weight
from vkback.ops.view import laid_out


class _Plain(Op):
    """MUL_MAT and MUL_MAT_ID: the fused op with no fusion."""

    roles: tuple[str, ...]

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return MatVec().reference(inputs, {**params, "roles": self.roles})

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        fused = Node("MAT_VEC", node.inputs, node.outputs, {**node.params, "roles": self.roles})
        return [dataclasses.replace(d, op=node.op) if d.op == "MAT_VEC" else d for d in MatVec().lower(fused, ctx)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return MatVec().tolerance(Node("MAT_VEC", node.inputs, node.outputs, {"roles": self.roles}), ctx)


@register
class MulMat(_Plain):
    """MUL_MAT(w [m, k], x F32 or Q8_1 [n, k]) -> F32 [n, m].

    Batched: w [b3, b2, m, k], x [r3 * b3, r2 * b2, n, k] -> [r3 * b3, r2 * b2, n, m]; r2 (r3) slices of x in a row share a matrix. w may be
    F32 or F16 that is no weight, x F16, and either a view of its tensor (params `w_view`, `x_view`).
    """

    name = "MUL_MAT"
    roles = ("w", "x")

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [batched.reference(params, inputs)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return batched.lower(node, ctx) if batched.is_batched(node) else super().lower(node, ctx)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return batched.tolerance(node, ctx) if batched.is_batched(node) else super().tolerance(node, ctx)

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            if quant in RARE:
                yield mul_mat_case(quant, 19, 8, 256)
                yield mul_mat_case(quant, 131, 1, 2048)
                yield mul_mat_case(quant, 33, 2, 2048)
                continue
            for n in (1, 2, 3, 5, 8, 9, 16, 17):
                yield mul_mat_case(quant, 16, n, 256)
            yield mul_mat_case(quant, 1, 16, 256)  # several tokens: a single value may be small by chance, and its NMSE large
            yield mul_mat_case(quant, 131, 1, 2048)
            yield mul_mat_case(quant, 33, 2, 4096)
        for quant in ("F32", "F16", "BF16"):
            for k in (65, 80, 588):
                yield mul_mat_case(quant, 17, 2, k)
        for quant in ("Q4_0", "Q8_0", "MXFP4", "Q5_1"):
            yield mul_mat_case(quant, 40, 1, 2880)
        for quant in ("F32", "Q4_K", "Q8_0"):
            yield batched_case(quant, 17, 3, 256, (1, 3), (2, 2))
            yield batched_case(quant, 17, 2, 256, (3, 2), (1, 2), order=(0, 2, 1, 3), gap=256)
        yield batched_case("F16", 17, 3, 80, (2, 2), (1, 3), order=(0, 1, 3, 2), plain=True, x_type="F16")
        yield batched_case("F32", 5, 4, 65, (1, 1), (2, 3), plain=True)


@register
class MulMatId(_Plain):
    """MUL_MAT_ID(w [n_expert, m, k], x F32 [n, 1 or n_used, k], ids I32 [n, n_used]) -> F32 [n, n_used, m]."""

    name = "MUL_MAT_ID"
    roles = ("w", "x", "ids")

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            if quant in RARE:
                yield mul_mat_id_case(quant, 4, 2, 24, 2, 256, shared=True)
                continue
            for experts, used in ((4, 1), (8, 2), (8, 4)):
                for n in (1, 5):
                    yield mul_mat_id_case(quant, experts, used, 32, n, 256, shared=used != 4)


def batched_case(
    quant: str, m: int, n: int, k: int, batch: tuple[int, int], repeat: tuple[int, int], *, order: tuple[int, ...] = (), gap: int = 0,
    plain: bool = False, x_type: str = "F32", seed: int = 7,
) -> Case:
    """A batched MUL_MAT: w [*batch, m, k], x [repeat times batch, n, k].

    order, gap  how the values of both operands lie in memory (see `laid_out`); given, they are views
    plain       w is no weight but F32 or F16 that the device has, as a cache is
    """
    shapes = (*batch, m, k), (batch[0] * repeat[0], batch[1] * repeat[1], n, k)
    order = order or ((0, 1, 2, 3) if gap else ())
    (w_inner, w_view), (x_inner, x_view) = (laid_out(s, order, gap=gap) for s in shapes)

    def make(rng: np.random.Generator) -> Problem:
        w = Tensor("w", quant, w_inner, "state") if plain else weight("w", quant, w_inner)
        x, y = Tensor("x", x_type, x_inner, "input"), Tensor("y", "F32", (*shapes[1][:2], n, m))
        node = Node("MUL_MAT", (w, x), (y,), {"w_view": w_view, "x_view": x_view} if order else {})
        w_values = some(quant, w_inner, rng) if plain else quants.random_blocks(quant, prod(w_inner[:-1]), w_inner[-1], rng, std=0.5)
        return Problem(node, {"w": w_values, "x": some(x_type, x_inner, rng)})

    shown: dict[str, Any] = {"type_a": quant, "type_b": x_type.lower(), "m": m, "n": n, "k": k, "bs": batch, "nr": repeat}
    shown |= {"order": order} if order else {}
    shown |= {"gap": gap} if gap else {}
    shown |= {"plain": 1} if plain else {}
    return Case("MUL_MAT", {**shown, "seed": seed}, make, seed)

"""MUL_MAT and MUL_MAT_ID: what the graph asks for, as the mat-vec family carries it out (mat_vec, mul_mat_batched)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops import mul_mat_batched as batched
from vkback.ops.base import Array, Case, Dispatch, LowerContext, Op, Problem, Rounded, Shape, Tolerance, nbytes, register
from vkback.ops.copy import some
from vkback.ops.cost import Cost
from vkback.ops.mat_vec import QUANTS, RARE, MatVec, weight
from vkback.ops.mat_vec_cases import (
    BASE,
    full_mul_mat,
    full_mul_mat_id,
    known_type,
    mul_mat_case,
    mul_mat_id_case,
    paths,
    perf_mul_mat,
    perf_mul_mat_id,
    prompts_mul_mat,
    prompts_mul_mat_id,
    scaled_sums,
    with_x,
)
from vkback.ops.view import ORDERS, TRANSPOSED, laid_out


class _Plain(Op):
    """MUL_MAT and MUL_MAT_ID: the fused op with no fusion."""

    roles: tuple[str, ...]
    peer_nmse = 5e-4
    weight_type = "type_a"
    shares_weights = True
    formula = "X*Y"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """A multiply-add for each value of a row and each value of the output."""
        w = node.params["w_view"].shape if "w_view" in node.params else node.inputs[0].shape
        return {"fmul": w[-1] * node.outputs[0].elements}

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        fused = Node("MAT_VEC", node.inputs, node.outputs, {**node.params, "roles": self.roles})
        return [dataclasses.replace(d, op=node.op) if d.op == "MAT_VEC" else d for d in MatVec().lower(fused, ctx)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return MatVec().tolerance(Node("MAT_VEC", node.inputs, node.outputs, {"roles": self.roles}), ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        return MatVec().rounded(inputs, Node("MAT_VEC", node.inputs, node.outputs, {"roles": self.roles}), ctx)


@register
class MulMat(_Plain):
    """MUL_MAT(w [m, k], x F32 or Q8_1 [n, k]) -> F32 [n, m].

    Batched: w [b3, b2, m, k], x [r3 * b3, r2 * b2, n, k] -> [r3 * b3, r2 * b2, n, m]; r2 (r3) slices of x in a row share a matrix. w may be
    F32 or F16 that is no weight, x F16, and either a view of its tensor (params `w_view`, `x_view`).
    """

    name = "MUL_MAT"
    roles = ("w", "x")

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, x = inputs
        if w.ndim == x.ndim == 2 and not any(view in params for view in batched.VIEWS):
            return [np.asarray(x, np.float64) @ np.asarray(w, np.float64).T]
        return [batched.reference(params, inputs)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return batched.lower(node, ctx) if batched.is_batched(node) else super().lower(node, ctx)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return batched.tolerance(node, ctx) if batched.is_batched(node) else super().tolerance(node, ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        return batched.rounded(inputs, node, ctx) if batched.is_batched(node) else super().rounded(inputs, node, ctx)

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            if quant in RARE:
                yield mul_mat_case(quant, 19, 5, 256)
                yield mul_mat_case(quant, 131, 1, 2048)
                yield mul_mat_case(quant, 33, 2, 2048)
                yield _with_a_tail(quant)
                continue
            for n in (1, 2, 3, 5, 8, 9, 16, 17):
                yield mul_mat_case(quant, 16, n, 256)
            yield mul_mat_case(quant, 1, 9, 256)  # several tokens: a single value may be small by chance, and its NMSE large
            yield mul_mat_case(quant, 131, 1, 2048)
            yield mul_mat_case(quant, 33, 2, 4096)
            yield _with_a_tail(quant)
            if quants.QUANTS[quant].block_values <= 32:
                yield mul_mat_case(quant, 21, 1, 96)
        for quant in ("Q4_0", "Q8_0", "MXFP4"):  # software prefetch of w and x, several tiles a workgroup
            yield mul_mat_case(quant, 35, 1, 7 * 32).where(lanes=4, rows=2, unroll=2, prefetch="weights+x", groups=3)
        yield mul_mat_case("Q4_K", 35, 1, 5 * 256).where(lanes=4, rows=2, unroll=2, lane_order="blocked", prefetch="weights", groups=3)
        yield mul_mat_case("Q6_K", 203, 2, 256).where(range=20_000)  # shards of 64 rows
        for quant in ("F32", "F16", "BF16"):
            for k in (65, 80, 588):
                yield mul_mat_case(quant, 17, 2, k)
        for quant in ("Q4_0", "Q8_0", "MXFP4", "Q5_1"):
            yield mul_mat_case(quant, 40, 1, 2880)
        for quant in ("F32", "Q4_K", "Q8_0"):
            yield batched_case(quant, 17, 3, 256, (1, 3), (2, 2))
            yield batched_case(quant, 17, 2, 256, (3, 2), (1, 2), order=(0, 2, 1, 3), gap=256)
        yield batched_case("Q8_0", 35, 37, 96, (1, 3), (1, 2))  # a grouped mat-mat
        yield from scaled_sums()
        yield from prompts_mul_mat()
        yield batched_case("F16", 17, 3, 80, (2, 2), (1, 3), order=(0, 1, 3, 2), plain=True, type_b="f16")
        yield batched_case("F32", 5, 4, 65, (1, 1), (2, 3), plain=True)

    def full_cases(self) -> Iterator[Case]:
        yield from full_mul_mat()
        yield from full_batched()

    def perf_cases(self) -> Iterator[Case]:
        return perf_mul_mat()

    def build_case(
        self, type_a: str, m: int, n: int, k: int, type_b: str = "f32", bs: tuple[int, int] | None = None, nr: tuple[int, int] = (1, 1),
        order: Shape = (), gap: int = 0, plain: bool = False, act: str = "auto", amax: float = 1.0, seed: int = 7,
    ) -> Case:
        """bs: a batch of so many matrices, each for nr slices of x; order, gap and plain as in `batched_case`; else as `mul_mat_case`."""
        quant = known_type(type_a)
        if bs is None:
            return mul_mat_case(quant, m, n, k, type_b=type_b, act=act, amax=amax, seed=seed)
        return batched_case(quant, m, n, k, bs, nr, type_b=type_b, act=act, order=order, gap=gap, plain=plain, seed=seed)


def _with_a_tail(quant: str) -> Case:
    """Rows of five blocks of 256: the units of a row are no multiple of those that the lanes of two subgroups take at once, so that some of
    them have none in the end, and partial sums go through shared memory."""
    return mul_mat_case(quant, 35, 1, 5 * 256).where(wg=32, lanes=16, rows=2, unroll=2)


@register
class MulMatId(_Plain):
    """MUL_MAT_ID(w [n_expert, m, k], x F32 [n, 1 or n_used, k], ids I32 [n, n_used]) -> F32 [n, n_used, m]."""

    name = "MUL_MAT_ID"
    roles = ("w", "x", "ids")
    formula = "X[z]*Y"

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the experts' matrices as many as there are tokens times experts used: tokens that share an expert are not foreseen."""
        w, _, ids = node.inputs
        return nbytes(w) // w.shape[0] * min(w.shape[0], ids.elements) if tensor.name == w.name else nbytes(tensor)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, x, ids = inputs
        x = np.broadcast_to(np.asarray(x, np.float64), (*ids.shape, x.shape[-1]))
        out = np.zeros((*ids.shape, w.shape[1]))
        for expert in np.unique(ids):
            chosen = ids == expert
            out[chosen] = x[chosen] @ np.asarray(w[expert], np.float64).T
        return [out]

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            if quant in RARE:
                yield mul_mat_id_case(quant, 4, 2, 24, 2, 256, shared=True)
                continue
            for experts, used in ((4, 1), (8, 2), (8, 4)):
                for n in (1, 5):
                    yield mul_mat_id_case(quant, experts, used, 32, n, 256, shared=used != 4)
        yield mul_mat_id_case("Q8_0", 8, 3, 21, 2, 96, shared=False)
        yield from prompts_mul_mat_id()
        yield mul_mat_id_case("Q5_K", 4, 2, 35, 1, 1280, shared=True).where(wg=32, lanes=16, rows=2, unroll=2)

    def full_cases(self) -> Iterator[Case]:
        return full_mul_mat_id()

    def perf_cases(self) -> Iterator[Case]:
        return perf_mul_mat_id()

    def build_case(
        self, type_a: str, n_mats: int, n_used: int, m: int, n: int, k: int, type_b: str = "f32", b: bool = True, ids: str = "shuffled",
        act: str = "auto", amax: float = 1.0, seed: int = 7,
    ) -> Case:
        """n_mats experts, of which each token uses n_used; b: they share its x; ids: one of ROUTES."""
        quant = known_type(type_a)
        return mul_mat_id_case(quant, n_mats, n_used, m, n, k, shared=b, type_b=type_b, ids=ids, act=act, amax=amax, seed=seed)


def batched_case(
    quant: str, m: int, n: int, k: int, batch: tuple[int, int], repeat: tuple[int, int], *, type_b: str = "f32", act: str = "auto",
    order: Shape = (), gap: int = 0, plain: bool = False, seed: int = 7,
) -> Case:
    """A batched MUL_MAT: w [*batch, m, k], x [repeat times batch, n, k].

    type_b      "f32", "f16", or "q8_1" for activations that come quantized
    order, gap  how the values of both operands lie in memory (see `laid_out`); given, they are views
    plain       w is no weight but F32 or F16 that the device has, as a cache is
    """
    x_type = "F16" if type_b == "f16" else "F32"
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
    return with_x(Case("MUL_MAT", {**shown, "seed": seed}, make, seed), type_b, act, [])


def full_batched() -> Iterator[Case]:
    """As attention multiplies by its cache, and more: every type in a few shapes, base types in many."""
    repeats = ((1, 1), (1, 2), (2, 1), (2, 2))
    for quant in QUANTS:
        for path in paths(quant):
            for bs, nr, n in product(((1, 1), (1, 3), (2, 3)), repeats, (1, 4, 8, 16) if quant in BASE else (2,)):
                yield batched_case(quant, 16, n, 256, bs, nr, **path)
        for order, n in product(ORDERS, (1, 8, 16) if quant in BASE else (2,)):
            yield batched_case(quant, 16, n, 256, (3, 2), (1, 1), order=order)
        for n, k in product((1, 4), (256, 768)):
            yield batched_case(quant, 19, n, k, (1, 2), (1, 2), gap=256)
    for quant, x_type, n in product(("F32", "F16"), ("f32", "f16"), (1, 2, 8)):
        for m, k, nr in product((127, 128, 129, 1056), (64, 65, 128), ((1, 1), (1, 4))):
            if m < 1000 or k == 128:
                yield batched_case(quant, m, n, k, (1, 2), nr, plain=True, type_b=x_type)
        for order, gap, k in product((*ORDERS, *TRANSPOSED), (0, 64), (32, 80)):
            yield batched_case(quant, 40, n, k, (2, 3), (1, 2), order=order, gap=gap, plain=True, type_b=x_type)
    for quant in BASE:
        yield batched_case(quant, 8, 2, 256, (1, 1536), (1, 1))
        yield batched_case(quant, 70, 130, 256, (1, 5), (1, 1))

"""MUL_MAT_BACK (shaders/gemm_f32/gemm.comp): the gradient of a product with a weight by its activations, dX = dY W.

With act "f16" the products with quantized weights go by cooperative matrices, where the device has them (vkback/ops/matmul/gemm_lower.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Dispatch
from vkback.ops.ggml_words import sized, tensor_type, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import low_rank
from vkback.ops.matmul.choice import F16_TOLERANCE, TransposedChoice, choose_transposed
from vkback.ops.matmul.gemm_lower import lower_transposed
from vkback.ops.matmul.linear_cases import MATRICES
from vkback.ops.op import register
from vkback.ops.storage import in_planes
from vkback.ops.training.gemm_f32 import Product, lower_product, lower_product_by_weight
from vkback.ops.training.gradients import Gradient, Scalar, against


def adds(node: Node, ctx: LowerContext) -> bool:
    """Whether the kernel of a MUL_MAT_BACK can add a tensor to what it makes."""
    dy, w = node.inputs[:2]
    if not in_planes(w):
        return False
    if low_rank.is_factor(w, dy.shape[0], ctx):
        return not low_rank.makes_rank(w, back=True)
    return _choice(node, ctx).shape is not None


def _choice(node: Node, ctx: LowerContext) -> TransposedChoice:
    """The choice that a plan has made for a MUL_MAT_BACK with a stored weight; of a node outside a plan it is made here."""
    dy, w = node.inputs[:2]
    return node.choice if isinstance(node.choice, TransposedChoice) else choose_transposed(w, dy.shape[0], ctx)


@register
class MulMatBack(Gradient):
    """MUL_MAT_BACK(dy F32 [n, m], w [m, k] [, before F32 [n, k]]) -> dx F32 [n, k], to which `before` is added. w: F32, or a stored weight
    of any type."""

    name = "MUL_MAT_BACK"
    ggml_nmse = 5e-4
    weight_type = "type_a"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fmul": node.inputs[1].shape[0] * node.outputs[0].elements}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, w, *before = (np.asarray(i, np.float64) for i in inputs)
        return [dy @ w + before[0] if before else dy @ w]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        dy, w = (np.asarray(i, np.float64) for i in inputs[:2])
        return against(dy, lambda x: x @ w.T, np.zeros((len(dy), w.shape[1])))

    def choose(self, node: Node, ctx: LowerContext) -> TransposedChoice | None:
        return _choice(node, ctx) if in_planes(node.inputs[1]) and len(node.inputs[1].shape) == 2 else None

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, w, *more = node.inputs
        dx = node.outputs[0]
        before = more[0] if more else None
        if len(w.shape) != 2 or len(dy.shape) != 2 or dy.shape[1] != w.shape[0] or dx.shape != (dy.shape[0], w.shape[1]):
            raise PlanError(f"[{self.name}] {node.name}: {dy} times {w} to {dx}: expected dy [n, m], w [m, k], dx [n, k]")
        n = dy.shape[0]
        if before is not None and (before.shape != dx.shape or not adds(node, ctx)):
            raise PlanError(f"[{self.name}] {node.name}: {before} cannot be added to {dx} here; give the sum a node of its own")
        if in_planes(w):
            choice = _choice(node, ctx)
            if choice.shape is not None:
                return [dataclasses.replace(d, op=self.name) for d in lower_transposed(node.name, dy, w, dx, choice, ctx, before)]
            if low_rank.is_factor(w, n, ctx):
                return low_rank.product(node, ctx, dy, w, dx, back=True, before=before)
            return lower_product_by_weight(node, ctx, dy, w, dx, n)
        if w.type != "F32":
            raise PlanError(f"[{self.name}] {node.name}: {w} is no stored weight, so expected F32")
        return lower_product(node, ctx, dy, w, dx, Product(n, w.shape[1], w.shape[0]))

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if in_planes(node.inputs[1]) and _choice(node, ctx).shape is not None:
            return F16_TOLERANCE
        return Tolerance(1e-10, 2e-5, "f32 sums of products of values that either side holds exactly, times scales in f32")

    def build_case(
        self,
        type_a: str = "f32",
        m: int = 32,
        n: int = 8,
        k: int = 32,
        plain: bool = False,
        act: str = "auto",
        amax: float = 1.0,
        seed: int = 7,
    ) -> Case:
        """A weight of m rows of k values, n tokens. plain: w is no stored weight but F32 values one after the other; act: "f16" for
        matrices; amax: the largest gradient, each row being smaller than the one before by a third."""
        kind = tensor_type(type_a, "type_a")
        if min(m, n, k) < 1 or k % quants.quant(kind).block_values:
            raise CaseLineError(f"{self.name}: m={m}, n={n}, k={k}: expected numbers above 0, k whole blocks of {type_a}")
        if plain and kind != "F32":
            raise CaseLineError(f"{self.name}: plain=1 with type_a={type_a}: expected f32")
        if act not in ("auto", "f32", "f16"):
            raise CaseLineError(f"{self.name}: act={act}: expected one of auto, f32, f16")
        sized((m, k))
        sized((n, max(m, k)))

        def make(rng: np.random.Generator) -> Problem:
            dy, w = Tensor("dy", "F32", (n, m), "input"), Tensor("w", kind, (m, k), "input" if plain else "weight")
            node = Node(self.name, (dy, w), (Tensor("dx", "F32", (n, k)),))
            values = {"dy": numbers(dy, rng, 1.0), "w": numbers(w, rng, 1.0)}
            if amax != 1.0:
                values["dy"] = (values["dy"] * amax * 1.5 ** -np.arange(n)[:, None]).astype(np.float32)
            return Problem(node, values)

        shown: dict[str, Any] = {"type_a": type_word(kind), "m": m, "n": n, "k": k} | ({"plain": 1} if plain else {})
        shown |= ({"act": act} if act != "auto" else {}) | ({"amax": amax} if amax != 1.0 else {})
        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(m=67, n=37, k=70, plain=True)
        yield self.build_case(m=1040, n=3, k=40, plain=True).where(tiles="shared")
        yield self.build_case("q4_0", m=203, n=3, k=96).where(tiles="shared", range=8000)
        yield self.build_case(m=1040, n=3, k=40, plain=True)
        yield self.build_case("q4_K", m=37, n=3, k=256)
        yield self.build_case("iq2_xs", m=37, n=3, k=512)
        yield self.build_case(m=35, n=3, k=70)
        yield self.build_case("q4_0", m=203, n=3, k=96).where(range=8000)  # shards of 64 rows
        yield self.build_case(m=11, n=9, k=132).where(tiles="shared")  # factors of low rank
        yield self.build_case(m=132, n=6, k=11).where(tiles="shared")
        yield self.build_case(m=16, n=9, k=132).where(tiles="shared")
        yield self.build_case("q4_K", m=37, n=19, k=256, act="f16", amax=1e-7).where(**MATRICES)
        yield self.build_case("f16", m=70, n=19, k=80, act="f16", amax=1e7).where(**{**MATRICES, "split_k": 2})

    def full_cases(self) -> Iterator[Case]:
        for kind in quants.WEIGHT_TYPES:
            block = quants.quant(kind).block_values
            yield self.build_case(type_word(kind), m=37, n=3, k=block if block > 32 else 96)
            for m, split in ((37, 1), (291, 3)):
                yield self.build_case(type_word(kind), m=m, n=19, k=3 * block if block > 32 else 96, act="f16").where(
                    **{**MATRICES, "split_k": split}
                )
        yield self.build_case("q4_0", m=203, n=19, k=512, act="f16").where(range=40_000, **MATRICES)  # shards: by f32
        for n in (1, 9, 17, 33, 64, 65):
            yield self.build_case(m=130, n=n, k=300, plain=True)
            yield self.build_case("q4_K", m=130, n=n, k=512)
            yield self.build_case(m=130, n=n, k=300, plain=True).where(tiles="shared")
            yield self.build_case("q4_K", m=130, n=n, k=512).where(tiles="shared")

    def perf_cases(self) -> Iterator[Case]:
        for n in (512, 128, 2):
            yield self.build_case(m=1536, n=n, k=576)
            yield self.build_case(m=1536, n=n, k=576, plain=True)
        for act in ("auto", "f16"):
            yield self.build_case("q4_K", m=4096, n=512, k=4096, act=act)
        for m, k in ((14336, 4096), (4096, 14336), (1024, 4096)):
            yield self.build_case("q4_K", m=m, n=512, k=k, act="f16")
        yield self.build_case("q6_K", m=128256, n=512, k=4096, act="f16")

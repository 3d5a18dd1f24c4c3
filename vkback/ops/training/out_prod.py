"""OUT_PROD (shaders/gemm_f32/gemm.comp, out_prod_small_k.comp): y = b^T a, the sum of outer products of the rows of a and b."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.cost import Cost
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div
from vkback.ops.general import permuted, views_of
from vkback.ops.ggml_words import one_of_types, operand, sized, tensor_type, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import low_rank
from vkback.ops.op import Op, register
from vkback.ops.storage import VALUE_BYTES
from vkback.ops.training.gemm_f32 import Product, lower_product
from vkback.ops.view import View

SMALL_K = 8
"""Rows of a and b up to which their product goes without tiles."""


def four(shape: Shape) -> tuple[int, int, int, int]:
    """Four axes, those in front of length 1."""
    b3, b2, rows, columns = (1,) * (4 - len(shape)) + tuple(shape)
    return b3, b2, rows, columns


@register
class OutProd(Op):
    """OUT_PROD(a any type [b3, b2, k, m], b any plain type [b3 r3, b2 r2, k, n]) -> F32 [b3 r3, b2 r2, n, m]; either may be a view.

    Without batches OUT_PROD(a [k, m], b [k, n] [, y]) -> [n, m]: of x [tokens, k] and dy [tokens, m] the gradient of a weight [m, k]. With
    the output as third operand, the product is added to what it holds.
    """

    name = "OUT_PROD"
    ggml_nmse = 5e-4

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, b, *y = (np.asarray(x, np.float64) for x in inputs)
        if a.ndim == 2:
            return [b.T @ a + y[0] if y else b.T @ a]
        for axis in (0, 1):
            a = np.repeat(a, b.shape[axis] // a.shape[axis], axis=axis)
        return [np.swapaxes(b, 2, 3) @ a]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y = node.outputs[0]
        copies, floats = [], []
        for i, t in enumerate(node.inputs[:2]):
            more, plain = as_floats(node, ctx, t, views_of(node.params).get(i))
            copies += more
            floats.append(plain)
        a, b = floats
        (a3, a2, k, m), (n3, n2, b_k, n), y_shape = (four(t.shape) for t in (a, b, y))
        add = len(node.inputs) > 2
        if b_k != k or n3 % a3 or n2 % a2 or y_shape != (n3, n2, n, m) or (add and node.inputs[2].name != y.name):
            raise PlanError(f"[{self.name}] {node.name}: {a} and {b} to {y}: they do not fit")
        product = Product(n, m, k, transposed=True, batches=n3 * n2, n2=n2, r2=n2 // a2, r3=n3 // a3)
        if k <= SMALL_K and n <= 8 * MAX_GROUPS_X and n3 * n2 <= MAX_GROUPS_X:
            return [*copies, self._of_small_k(node, ctx, a, b, product, add)]
        if n3 * n2 == 1 and len(a.shape) == 2 and low_rank.is_narrow(k, max(m, n), min(m, n), ctx):
            return [*copies, *low_rank.outer(node, ctx, a, b, y, add=add)]
        return [*copies, *lower_product(node, ctx, b, a, y, product, add=add)]

    def _of_small_k(self, node: Node, ctx: LowerContext, a: Tensor, b: Tensor, product: Product, add: bool) -> Dispatch:
        """Of few k: a thread has a column of eight rows."""
        rows, columns = product.m, product.n
        return by_threads(
            node,
            ctx,
            "gemm_f32/out_prod_small_k.comp",
            (Arg(a), Arg(b), Arg(node.outputs[0], "rw" if add else "w")),
            (columns, rows, product.k, product.n2, product.r2, product.r3, int(add)),
            columns,
            grid=(ceil_div(rows, 8), product.batches),
            flops=2 * product.k * node.outputs[0].elements,
        )

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fmul": four(node.inputs[0].shape)[2] * node.outputs[0].elements}

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of products of values that either side holds exactly")

    def build_case(
        self,
        type_a: str = "f32",
        type_b: str = "f32",
        m: int = 32,
        n: int = 32,
        k: int = 32,
        bs: tuple[int, int] = (10, 10),
        nr: tuple[int, int] = (2, 2),
        trans_b: bool = False,
        add: bool = False,
        seed: int = 7,
    ) -> Case:
        """trans_b: b's last two axes are exchanged in memory; add: without batches, the product is added to what y holds."""
        kind_a, kind_b = tensor_type(type_a, "type_a"), one_of_types(type_b, ("F32", "F16", "BF16"), "type_b")
        if min(m, n, k, *bs, *nr) < 1 or (kind_a not in VALUE_BYTES and m % quants.quant(kind_a).block_values):
            raise CaseLineError(f"m={m}, n={n}, k={k}, bs={list(bs)}, nr={list(nr)}: expected all above 0, and m whole blocks of {type_a}")
        a_shape, b_shape = sized((bs[1], bs[0], k, m)), sized((bs[1] * nr[1], bs[0] * nr[0], *((n, k) if trans_b else (k, n))))
        if add and (a_shape[:2] != (1, 1) or b_shape[:2] != (1, 1) or trans_b):
            raise CaseLineError("OUT_PROD: add=1: expected bs=[1,1], nr=[1,1], trans_b=0")
        view = permuted(b_shape, (1, 0, 2, 3)) if trans_b else View.whole(b_shape)

        def make(rng: np.random.Generator) -> Problem:
            a, b = operand("a", kind_a, a_shape), Tensor("b", kind_b, b_shape, "input")
            if add:
                a, b = (dataclasses.replace(t, shape=t.shape[2:]) for t in (a, b))
                y = Tensor("y", "F32", (n, m), "state")
                return Problem(Node(self.name, (a, b, y), (y,)), {t.name: numbers(t, rng, 1.0) for t in (a, b, y)})
            y = Tensor("y", "F32", sized((*b_shape[:2], n, m)))
            return Problem(
                Node(self.name, (a, b), (y,), {"views": {1: view}} if trans_b else {}),
                {"a": numbers(a, rng, 1.0), "b": numbers(b, rng, 1.0)},
            )

        shown = {"type_a": type_word(kind_a), "type_b": type_word(kind_b), "m": m, "n": n, "k": k, "bs": bs, "nr": nr}
        return Case(self.name, {**shown, "trans_b": int(trans_b), **({"add": 1} if add else {}), "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", "f16", 33, 5, 7, (2, 3), (2, 1), trans_b=True)
        yield self.build_case("q4_0", "f32", 64, 3, 16, (2, 2), (2, 2))
        yield self.build_case("q4_0", "f32", 64, 3, 16, (2, 2), (2, 2)).where(tiles="shared")
        yield self.build_case("f32", "f32", 70, 37, 33, (1, 1), (1, 1), add=True)
        yield self.build_case("f32", "f32", 70, 37, 2, (1, 1), (1, 1), add=True)
        yield self.build_case("f32", "f32", 132, 9, 21, (1, 1), (1, 1), add=True).where(tiles="shared")
        yield self.build_case("f32", "f32", 11, 132, 21, (1, 1), (1, 1), add=True).where(tiles="shared")
        yield self.build_case("f32", "f32", 132, 16, 99, (1, 1), (1, 1), add=True).where(tiles="shared")

    def full_cases(self) -> Iterator[Case]:
        for kind in quants.WEIGHT_TYPES:
            yield self.build_case(type_word(kind), "f32", 256, 16, 16, (3, 3), (2, 1))

    def perf_cases(self) -> Iterator[Case]:
        """Gradients of weights of SmolLM 135M, of 512 and of 2 tokens."""
        for k in (512, 2):
            yield self.build_case("f32", "f32", 576, 1536, k, (1, 1), (1, 1))

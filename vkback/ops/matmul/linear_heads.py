"""LINEAR_HEADS: a matrix for each head times that head's part of x, one launch of the GEMV kernels (shaders/gemv).

    LINEAR_HEADS(w [n_head, m, k], x F32 or Q8_1 [n, n_head * width]) -> F32 or Q8_1 [n, n_head * m]
              Head h reads values h * width .. + k of x; k and width are multiples of 32, m too where the output is Q8_1.

It is what MLA's k_b and v_b are. Many tokens take a grouped GEMM, whose experts are the heads (vkback/ops/matmul/gemm_lower.py). As MUL_MAT
it would be a batch that is copied first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Rounded, Tolerance, f16_values
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.case_sets import BASE
from vkback.ops.matmul.choice import F16_TOLERANCE, ProductChoice, choice_of, choose
from vkback.ops.matmul.gemm_lower import lower_node
from vkback.ops.matmul.linear import by_gemv, f16_weight_noise, linear_tolerance
from vkback.ops.matmul.linear_cases import known_type, with_x
from vkback.ops.matmul.linear_node import QUANTS, LinearNode, weight
from vkback.ops.op import Op, register
from vkback.ops.quantize import rounded_rows, rounded_tolerance
from vkback.ops.storage import shards
from vkback.ops.view import View


def heads_problem(w: Tensor, x: Tensor, q8_out: bool = False) -> str:
    """Why a product by heads cannot be one launch; "" when it can."""
    heads, m, k = w.shape
    width = x.shape[-1] // heads
    if w.kind != "weight" or x.shape[-1] % heads or width % 32 or k % 32 or k > width:
        return f"{w} times {x}: expected a weight, and heads of whole units of 32 values, at least {k}"
    return f"{m} rows of a head are no whole units of 32" if q8_out and m % 32 else ""


@register
class LinearHeads(Op):
    """See the module's text."""

    name = "LINEAR_HEADS"
    ggml_nmse = 5e-4
    weight_type = "type_a"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, x = (np.asarray(t, np.float64) for t in inputs)
        x = x.reshape(len(x), len(w), -1)[:, :, : w.shape[-1]]
        return [np.einsum("hmk,nhk->nhm", w, x).reshape(len(x), -1)]

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        if not self._rounds_x(node, ctx):
            return None
        w, x = inputs
        return Rounded(self.reference([w, rounded_rows(x)], node.params), rounded_tolerance(w.shape[-1]))

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        if choice_of(LinearNode.of(node), ctx).rounds != "F16":
            return None
        w, x = inputs
        (y,) = self.reference([w, f16_values(x)], node.params)
        return [y + f16_weight_noise(y, node.name)]

    @staticmethod
    def _rounds_x(node: Node, ctx: LowerContext) -> bool:
        return node.inputs[1].type == "F32" and choice_of(LinearNode.of(node), ctx).rounds == "Q8_1"

    def choose(self, node: Node, ctx: LowerContext) -> ProductChoice:
        return choose(LinearNode.of(node), ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        gemv = LinearNode.of(node)
        problem = heads_problem(gemv.w, gemv.x, gemv.y.type == "Q8_1")
        if problem or len(shards(gemv.w, ctx.caps)) != 1:
            raise PlanError(f"[gemv] {node.name}: {problem or f'{gemv.w} does not fit one storage buffer'}")
        choice = choice_of(gemv, ctx)
        return by_gemv(gemv, choice, ctx) if choice.shape is None else lower_node(gemv, choice, ctx)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if choice_of(LinearNode.of(node), ctx).kernel == "coop_mat" and node.outputs[0].type == "F32":
            return F16_TOLERANCE
        return linear_tolerance(self._rounds_x(node, ctx), node.outputs[0].type == "Q8_1")

    def cases(self) -> Iterator[Case]:
        for quant in ("Q4_K", "Q5_0", "Q8_0", "F16"):
            yield self.build_case(quant, 5, 96, 256, 1)
            yield self.build_case(quant, 3, 64, 512, 2, out="Q8_1")
        yield self.build_case("Q5_0", 16, 512, 128, 1, width=192)
        yield self.build_case("Q5_0", 16, 512, 128, 1, width=192, act="q8_1")
        yield self.build_case("Q8_0", 3, 33, 96, 3, width=160)
        yield self.build_case("Q4_K", 3, 40, 256, 1, width=288, type_b="q8_1")
        yield self.build_case("Q4_K", 16, 128, 512, 1, type_b="q8_1", out="Q8_1")
        # Barrier-free, a head's part of x is copied into shared memory, as F32 and as Q8_1.
        yield self.build_case("Q8_0", 3, 32, 64, 1, act="f32").where(sync="sentinel")
        yield self.build_case("Q4_K", 3, 40, 256, 1, width=288, act="f32").where(sync="sentinel")
        yield self.build_case("Q8_0", 3, 32, 64, 1, type_b="q8_1").where(sync="sentinel")
        yield self.build_case("Q8_0", 3, 33, 96, 37, width=160)  # a grouped GEMM
        yield self.build_case("Q8_0", 5, 64, 96, 20, out="Q8_1")

    def full_cases(self) -> Iterator[Case]:
        for quant, n, (m, k, width) in product(QUANTS, (1, 3), ((128, 512, 512), (64, 256, 320))):
            for type_b in ("f32", "q8_1") if quant in BASE else ("f32",):
                yield self.build_case(quant, 4, m, k, n, width=width, type_b=type_b)
                yield self.build_case(quant, 4, m, k, n, width=width, type_b=type_b, out="Q8_1")

        for quant, (m, k, width) in product(BASE, ((128, 512, 512), (70, 256, 320))):
            yield self.build_case(quant, 4, m, k, 130, width=width)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case("Q5_0", 16, 512, 128, 512, width=192)
        yield self.build_case("Q4_K", 16, 128, 512, 512)
        yield self.build_case("Q5_0", 16, 512, 128, 1, width=192)
        yield self.build_case("Q4_K", 16, 128, 512, 1, type_b="q8_1")
        yield self.build_case("Q5_0", 128, 512, 128, 1, width=192)
        yield self.build_case("Q4_K", 128, 128, 512, 1, type_b="q8_1")

    def build_case(
        self,
        type_a: str,
        n_head: int,
        m: int,
        k: int,
        n: int,
        width: int = 0,
        type_b: str = "f32",
        act: str = "auto",
        out: str = "F32",
        seed: int = 7,
    ) -> Case:
        """width: values of a head of x, 0: k."""
        quant, width = known_type(type_a), width or k

        def make(rng: np.random.Generator) -> Problem:
            w, x = weight("w", quant, (n_head, m, k)), Tensor("x", "F32", (n, n_head * width), "input")
            node = Node(self.name, (w, x), (Tensor("y", out, (n, n_head * m)),))
            blocks = quants.random_blocks(quant, n_head * m, k, rng, std=0.5)
            return Problem(node, {"w": blocks, "x": rng.uniform(-1, 1, x.shape).astype(np.float32)})

        shown: dict[str, Any] = {"type_a": quant, "n_head": n_head, "m": m, "k": k, "n": n, "width": width, "out": out}
        return with_x(Case(self.name, {**shown, "seed": seed}, make, seed), type_b, act, [])

    def unfused(self, node: Node) -> list[Node]:
        w, x = node.inputs
        y, (heads, m, k), n = node.outputs[0], w.shape, x.shape[0]
        if x.type != "F32":
            return []
        width = x.shape[-1] // heads
        product = Tensor(f"{y.name}.by_head", "F32", (heads, n, m))
        flat = y if y.type == "F32" else Tensor(f"{y.name}.f32", "F32", y.shape)
        chain = [
            Node("MUL_MAT", (w, x), (product,), {"x_view": View(0, (heads, n, k), (width, heads * width, 1))}),
            Node("CONT", (product,), (flat,), {"view": View(0, (n, heads, m), (m, n * m, 1))}),
        ]
        return chain if flat is y else [*chain, Node("QUANTIZE_Q8_1", (flat,), (y,))]

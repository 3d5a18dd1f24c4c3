"""LIGHTNING_INDEXER (shaders/indexer): scores by which DeepSeek V3.2 picks the rows of a cache that attention reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.ggml_words import operand, sized, tensor_type, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import VALUE_BYTES


@register
class LightningIndexer(Op):
    """LIGHTNING_INDEXER(q F32 [s, n, heads, dim], k any type [s, rows, 1, dim], weights F32 [s, 1, n, heads], mask F16 [m, 1, n, rows]) ->
    F32 [s, 1, n, rows]: of each row the weighted sum over heads of max(q . k, 0), plus the mask, which repeats over s."""

    name = "LIGHTNING_INDEXER"
    ggml_nmse = 1e-6

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        q, k, weights, mask = (np.asarray(x, np.float64) for x in inputs)
        out = np.empty((len(q), 1, q.shape[1], k.shape[1]))
        for s in range(len(q)):
            dots = np.maximum(q[s] @ k[s, :, 0].T, 0.0)  # [n, heads, rows]
            out[s, 0] = np.einsum("nh,nhr->nr", weights[s, 0], dots) + mask[s % len(mask), 0]
        return [out]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, k, weights, mask = node.inputs
        y = node.outputs[0]
        streams, n, heads, dim = q.shape
        rows = k.shape[1]
        fits = k.shape == (streams, rows, 1, dim) and weights.shape == (streams, 1, n, heads) and mask.shape[1:] == (1, n, rows)
        if not fits or mask.type != "F16" or y.shape != (streams, 1, n, rows):
            raise PlanError(f"[{self.name}] {node.name}: {q}, {k}, {weights}, {mask} to {y}: they do not fit")
        copies, floats = as_floats(node, ctx, k)
        args = (Arg(q), Arg(floats), Arg(weights), Arg(mask), Arg(y, "w"))
        push = (streams * n, n, rows, heads, dim, mask.shape[0])
        threads = streams * n * ceil_div(rows, 4)
        return [*copies, by_threads(node, ctx, "indexer/indexer.comp", args, push, threads, flops=2 * heads * dim * y.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 3e-5, "f32 sums of products, over heads of either sign")

    def build_case(
        self,
        hsk: int = 128,
        nh: int = 64,
        kv: int = 256,
        nb: int = 1,
        ns: int = 1,
        nm: int = 1,
        type_K: str = "f16",  # noqa: N803
        seed: int = 5,
    ) -> Case:
        """hsk: head size, nh: heads, kv: rows, nb: tokens, ns: streams, nm: streams of the mask."""
        kind = tensor_type(type_K, "type_K")
        if min(hsk, nh, kv, nb, ns, nm) < 1 or ns % nm or (kind not in VALUE_BYTES and hsk % quants.quant(kind).block_values):
            raise CaseLineError(
                f"hsk={hsk}, nh={nh}, kv={kv}, nb={nb}, ns={ns}, nm={nm}: expected numbers above 0, ns a multiple of nm, "
                f"and hsk whole blocks of {type_K}"
            )
        for shape in ((ns, nb, nh, hsk), (ns, kv, hsk), (ns, nb, kv)):
            sized(shape)

        def make(rng: np.random.Generator) -> Problem:
            q, weights = Tensor("q", "F32", (ns, nb, nh, hsk), "input"), Tensor("weights", "F32", (ns, 1, nb, nh), "input")
            k, mask = operand("k", kind, (ns, kv, 1, hsk)), Tensor("mask", "F16", (nm, 1, nb, kv), "input")
            values = {t.name: numbers(t, rng, 1.0) for t in (q, k, weights, mask)}
            values["mask"][rng.random(mask.shape) < 0.2] = -np.inf
            return Problem(Node(self.name, (q, k, weights, mask), (Tensor("y", "F32", (ns, 1, nb, kv)),)), values)

        shown = {"hsk": hsk, "nh": nh, "kv": kv, "nb": nb, "ns": ns, "nm": nm, "type_K": type_word(kind), "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(64, 5, 33, 3, 2, 1, "q4_0")

    def full_cases(self) -> Iterator[Case]:
        for kind, nm in product(("f32", "f16", "bf16", "q8_0"), (1, 2)):
            yield self.build_case(128, 32, 256, 9, 2, nm, kind)

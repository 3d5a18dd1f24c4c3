"""ADD_ID: to each expert's output its bias (shaders/moe/add_id.comp).

a F32 [n, n_used, m], b F32 [n_expert * m] (the experts' rows end to end), ids I32 [n, n_used] -> F32 [n, n_used, m]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.ggml_words import one_of_types, sized
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant


@register
class AddId(Op):
    """See the module's text."""

    name = "ADD_ID"
    formula = "x+y[z]"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fadd": node.outputs[0].elements}

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the biases one row for each id, at most all."""
        a, b, ids = node.inputs
        return 4 * min(b.elements, ids.elements * a.shape[-1]) if tensor.name == b.name else nbytes(tensor)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        a, b, ids = inputs
        return [np.asarray(a, np.float64) + np.asarray(b, np.float64).reshape(-1, a.shape[-1])[ids]]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        a, b, ids = node.inputs
        m = a.shape[-1]
        if b.elements % m or a.elements != ids.elements * m:
            raise PlanError(f"[ADD_ID] {node.name}: {b} and {ids} do not fit {a}; expected rows of {m} values and an id for each row")
        width = 4 if m % 4 == 0 else 1
        elements = a.elements // width
        choice = ctx.tuning.pick("elementwise", elements=a.elements)
        wg = workgroup_size(ctx.caps, choice["wg_size"], elements)
        return [
            Dispatch(
                kernel=Variant.of("moe/add_id.comp", {"WG_SIZE": wg, "WIDTH": width}),
                args=(Arg(a), Arg(b), Arg(ids), Arg(node.outputs[0], "w")),
                push=pack_push(elements, m // width),
                groups=spread(ceil_div(elements, wg)),
                op=node.op,
                label=node.name,
                reason=choice.source,
                nbytes=2 * nbytes(a) + 4 * min(a.elements, b.elements) + nbytes(ids),
                flops=a.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-13, 1e-6, "one addition in f32")

    def cases(self) -> Iterator[Case]:
        for n_expert, used, m, n in ((4, 2, 5, 1), (32, 4, 2880, 1), (32, 4, 96, 17), (8, 8, 33, 3)):
            yield self.build_case(n_embd=m, n_experts=n_expert, n_experts_used=used, n_token=n)

    def full_cases(self) -> Iterator[Case]:
        for n, used, m in product((1, 3, 33), (1, 4), (1, 33, 768, 2880)):
            yield self.build_case(n_embd=m, n_experts=32, n_experts_used=used, n_token=n)

    def build_case(
        self,
        type_a: str = "f32",
        type_b: str = "f32",
        n_embd: int = 128,
        n_experts: int = 16,
        n_experts_used: int = 8,
        n_token: int = 10,
        seed: int = 47,
    ) -> Case:
        """Normal values; a token's experts are all different."""
        for key, word in (("type_a", type_a), ("type_b", type_b)):
            one_of_types(word, ("F32",), key)
        if not 1 <= n_experts_used <= n_experts:
            raise CaseLineError(f"ADD_ID: n_experts_used={n_experts_used}: expected 1 to {n_experts}, the experts")
        sized((n_experts, n_embd))
        shape = sized((n_token, n_experts_used, n_embd))

        def make(rng: np.random.Generator) -> Problem:
            a, ids = Tensor("a", "F32", shape, "input"), Tensor("ids", "I32", shape[:2], "input")
            b = Tensor("b", "F32", (n_experts * n_embd,), "weight")
            values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in (a, b)}
            values["ids"] = np.stack([rng.permutation(n_experts)[:n_experts_used] for _ in range(n_token)]).astype(np.int32)
            return Problem(Node(self.name, (a, b, ids), (Tensor("y", "F32", a.shape),)), values)

        sizes = {"n_embd": n_embd, "n_experts": n_experts, "n_experts_used": n_experts_used, "n_token": n_token}
        return Case(self.name, {"type_a": type_a.lower(), "type_b": type_b.lower(), **sizes, "seed": seed}, make, seed)

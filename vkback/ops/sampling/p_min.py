"""DRAFT_P_MIN (shaders/sample/p_min.comp): drafts of a model end before the first token to which it gives less than a least probability.

    logits F32 [1, vocab], loop I32 [32 + capacity] -> loop in place
    params: capacity; p_min; ids (of SAMPLE: the token's id is not the place of its logit)

It follows SAMPLE with greedy. The token that was made last has the probability 1 / sum(exp(logit - its own)). Where that is below p_min,
and of all tokens behind such a one in a round (which begins with step 1), the id in the ring becomes -1, and word 3 of `loop` 1. tokens and
pos go on. Nothing happens once the loop has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

LEFT_OUT = 3
"""Word of a loop: a token of this round was left out."""

KINDS = ("sure", "unsure", "after", "first", "begin", "stopped")
"""What a case is like: the last token has the probability; it has less; it has it, but one before had not; it is the first of a round whose
predecessor left one out; nothing was made; the loop has stopped."""


@register
class DraftPMin(Op):
    """See the module's text."""

    name = "DRAFT_P_MIN"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, loop = (np.array(i) for i in inputs)
        step = int(loop[0])
        if loop[1] != STATUS_RUNNING or step < 1:
            return [loop]
        last = LOOP_RING + (step - 1) % params["capacity"]
        x = logits[0].astype(np.float64)
        own = x.max() if params.get("ids") else x[loop[last]]
        left_out = bool((step > 1 and loop[LEFT_OUT]) or params["p_min"] * np.exp(x - own).sum() > 1)
        loop[LEFT_OUT] = left_out
        if left_out:
            loop[last] = -1
        return [loop]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, loop = node.inputs
        capacity, vocab = node.params["capacity"], logits.shape[-1]
        if loop.shape != (LOOP_RING + capacity,) or logits.shape != (1, vocab):
            raise PlanError(
                f"[DRAFT_P_MIN] {node.name}: {logits}, {loop}; expected the logits of a token and {LOOP_RING + capacity} words for a ring "
                f"of {capacity}"
            )
        wg = workgroup_size(ctx.caps, ctx.tuning.pick("argmax", vocab=vocab, n=1)["wg_size"], vocab)
        reduce, subgroup = reduction(ctx.caps, wg)
        return [
            Dispatch(
                kernel=Variant.of(
                    "sample/p_min.comp", {**reduce, **({"IDS": 1} if node.params.get("ids") else {})}, subgroup_size=subgroup
                ),
                args=(Arg(logits), Arg(loop, "rw")),
                push=pack_push(vocab, capacity, float(node.params["p_min"])),
                groups=(1, 1, 1),
                op=node.op,
                label=node.name,
                reason=f"{wg} threads",
                nbytes=nbytes(logits),
                flops=2 * vocab,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "a token is left out or not; cases keep its probability away from the least one")

    def cases(self) -> Iterator[Case]:
        for seed, (vocab, kind) in enumerate(product((77, 1000), KINDS), 1):
            yield self.build_case(vocab, kind, seed=seed)
        yield self.build_case(151936, "unsure")
        yield from (self.build_case(1000, kind, seed=seed, ids=True) for seed, kind in enumerate(KINDS, 31))

    def full_cases(self) -> Iterator[Case]:
        for vocab, kind, p_min in product((1, 31, 32000, 151936), KINDS, (0.3, 0.9)):
            yield self.build_case(vocab, kind, p_min)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(151936, "sure")
        yield self.build_case(32000, "sure")

    def build_case(self, vocab: int, kind: str = "sure", p_min: float = 0.6, seed: int = 1, ids: bool = False) -> Case:
        """kind: of KINDS. ids: the token's id is another one than the place of its logit."""
        if kind not in KINDS or vocab < 1 or not 0 < p_min < 1:
            raise CaseLineError(
                f"DRAFT_P_MIN: vocab={vocab}, kind={kind}, p_min={p_min}: expected 1 and more, one of {', '.join(KINDS)}, 0 to 1"
            )
        capacity = 5

        def make(rng: np.random.Generator) -> Problem:
            logits = (3 * rng.standard_normal((1, vocab))).astype(np.float32)
            top = int(rng.integers(vocab))
            others = np.delete(logits[0].astype(np.float64), top)
            wanted = p_min * 0.9 if kind == "unsure" else p_min + 0.5 * (1 - p_min)
            if len(others):
                logits[0, top] = np.log(np.exp(others).sum() * wanted / (1 - wanted))
            loop = np.full(LOOP_RING + capacity, -5, np.int32)
            loop[:LOOP_RING] = 0
            loop[0] = {"first": 1, "begin": 0}.get(kind, 8)
            loop[1] = STATUS_EOS if kind == "stopped" else STATUS_RUNNING
            loop[LEFT_OUT] = kind in ("after", "first")
            loop[LOOP_RING + (int(loop[0]) - 1) % capacity] = top + (vocab if ids else 0)
            tensors = (Tensor("result_output", "F32", logits.shape, "input"), Tensor("loop", "I32", loop.shape, "input"))
            node = Node(self.name, tensors, tensors[1:], {"capacity": capacity, "p_min": p_min, **({"ids": True} if ids else {})})
            return Problem(node, {"result_output": logits, "loop": loop})

        return Case(self.name, {"vocab": vocab, "kind": kind, "p_min": p_min, "seed": seed} | ({"ids": True} if ids else {}), make, seed)

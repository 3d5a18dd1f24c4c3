"""PENALTIES_DRAFTS: PENALTIES for n columns of one text, the last n - 1 of which are drafts (shaders/sample/penalties.comp with DRAFTS).

    logits F32 [n, vocab], bias F32 [vocab], seen I32 [4 + vocab + n_ctx], loop I32, tokens I32 [n], pos I32 [n]
    (, mask I32 [n, ceil(vocab / 32)]) -> y F32 [n, vocab]

It runs between the logits and SAMPLE_DRAFTS. The logits of column c are those after the tokens of columns 0..c, so it counts them in as
PENALTIES would one after the other, with the same bits; `seen` stays, since nobody knows yet which of them the text will have. Logits of a
column without a token (pos -1), and of a loop that has stopped, pass through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance, inputs_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.sampling.penalties import SEEN_COUNTS, TOLERANCE, Penalties, mask_of, mask_words, penalized
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING


@register
class PenaltiesDrafts(Op):
    """See the module's text."""

    name = "PENALTIES_DRAFTS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, bias, seen, loop, tokens, pos = (np.array(i) for i in inputs[:6])
        y = logits.astype(np.float64)
        for c in range(len(tokens)):
            if loop[1] == STATUS_RUNNING and pos[c] >= 0:
                mask = inputs[6][c] if len(inputs) > 6 else None
                y[c] = penalized(logits[c], bias, seen, int(tokens[c]), int(pos[c]), mask)
        return [y]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, bias, seen, loop, tokens, pos, *masks = node.inputs
        n, vocab = logits.shape
        n_ctx = seen.elements - SEEN_COUNTS - vocab
        if (
            bias.shape != (vocab,)
            or n_ctx < 1
            or {tokens.shape, pos.shape} != {(n,)}
            or [m.shape for m in masks] not in ([], [(n, mask_words(vocab))])
        ):
            raise PlanError(
                f"[PENALTIES_DRAFTS] {node.name}: {', '.join(map(str, node.inputs))}; expected {vocab} biases, in seen "
                f"{SEEN_COUNTS} words, counts and the text, for {n} columns a token, a position, {mask_words(vocab)} words of a mask"
            )
        y = node.outputs[0]
        return [
            by_threads(
                node,
                ctx,
                "sample/penalties.comp",
                (*map(Arg, (logits, bias, seen, loop, tokens, pos)), Arg(y, "w"), *map(Arg, masks)),
                (vocab, n_ctx),
                vocab,
                {"DRAFTS": 1, **({"MASKED": 1} if masks else {})},
                grid=(n, 1),
                moved=n * (12 * vocab + 4 * vocab + 4 * len(masks) * mask_words(vocab)),
                flops=5 * logits.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def cases(self) -> Iterator[Case]:
        for last_n in (0, 1, 3, 64):
            yield self.build_case(77, 8, last_n)
        yield self.build_case(1000, 16, 20, masked=True)
        yield self.build_case(77, 4, 5, length=2)
        yield self.build_case(77, 4, 5, stopped=True)
        yield self.build_case(151936, 2, 64)

    def full_cases(self) -> Iterator[Case]:
        for vocab, n, last_n, masked in product((1, 31, 4096), (1, 2, 5, 16, 32), (0, 1, 4, 64, 500), (False, True)):
            yield self.build_case(vocab, n, last_n, masked=masked)

    def perf_cases(self) -> Iterator[Case]:
        for n in (16, 8, 4):
            yield self.build_case(151936, n, 64, length=500)

    def build_case(
        self, vocab: int, n: int, last_n: int, length: int = 40, masked: bool = False, stopped: bool = False, seed: int = 1
    ) -> Case:
        """length: tokens of the text before column 0's, from the first twenty of the vocabulary, as are the drafts; of more than two
        columns the last has none. masked: a third of all tokens stay. stopped: the loop has."""
        if min(vocab, n, length) < 1:
            raise CaseLineError(f"PENALTIES_DRAFTS: vocab={vocab}, n={n}, length={length}: expected 1 and more")

        def make(rng: np.random.Generator) -> Problem:
            n_ctx = length + n + 2
            text = rng.integers(0, min(20, vocab), length + n)
            values: dict[str, Array] = {
                "result_output": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "bias": rng.choice([0.0, 0.0, 2.5], vocab).astype(np.float32),
                "seen": Penalties(1.3, 0.5, 0.25, last_n).words(text[:length].tolist(), vocab, n_ctx),
                "loop": np.zeros(LOOP_RING + 5, np.int32),
                "tokens": text[length:].astype(np.int32),
                "pos": length + np.arange(n, dtype=np.int32),
            }
            if n > 2:
                values["pos"][-1] = -1
            if stopped:
                values["loop"][1] = STATUS_EOS
            if masked:
                values["mask"] = np.stack([mask_of(rng.random(vocab) < 1 / 3) for _ in range(n)])
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (Tensor("y", "F32", (n, vocab)),)), values)

        shown = {"vocab": vocab, "n": n, "last_n": last_n, "length": length, "masked": masked, "stopped": stopped, "seed": seed}
        return Case(self.name, shown, make, seed)

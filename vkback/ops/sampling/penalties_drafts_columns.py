"""PENALTIES_DRAFTS_COLUMNS: PENALTIES_COLUMNS where some sequences have drafts (shaders/sample/penalties.comp with COLUMNS and DRAFTS).

    logits F32 [n, vocab], bias F32 [n_slots, vocab], seen I32 [n_slots, 4 + vocab + max_rows], loops I32 [n_slots, 32 + capacity],
    tokens, pos, slots, draws I32 [n] (, mask I32 [n, ceil(vocab / 32)]) -> y F32 [n, vocab]

It runs between the logits and SAMPLE_DRAFTS_COLUMNS, whose columns these are: draws 1 is the last token of a sequence, 1 + i its draft i,
at the position behind those before it. The logits of a column are those after the sequence's last token and its drafts up to the column's
own, so it counts these in as PENALTIES would one after the other, with the same bits; `seen` stays, since nobody knows yet which of them
the sequence will have. A mask is that of a column. Logits of a column that picks nothing pass through, as of PENALTIES_COLUMNS.
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
from vkback.ops.sampling.lookup_columns import MAX_BATCH_COLUMNS, shuffled_columns
from vkback.ops.sampling.penalties import SEEN_COUNTS, TOLERANCE, Penalties, mask_of, mask_words, penalized
from vkback.ops.sampling.penalties_columns import rows_of_texts
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING

KINDS = ("penalized", "unpenalized", "penalized", "hole", "penalized", "idle", "penalized", "stopped", "penalized", "first", "no_slot")
"""What a case's sequences are like, one after the other: with penalties; without; its columns are holes; they do not draw; it has stopped;
its last token is the first of its text; its slot is none."""


@register
class PenaltiesDraftsColumns(Op):
    """See the module's text."""

    name = "PENALTIES_DRAFTS_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, bias, seen, loops, tokens, pos, slots, draws = (np.array(i) for i in inputs[:8])
        y = logits.astype(np.float64)
        for t, slot in enumerate(slots):
            if pos[t] < 0 or not draws[t] or not 0 <= slot < len(loops) or loops[slot, 1] != STATUS_RUNNING:
                continue
            own = {int(draws[c]): c for c in range(len(tokens)) if slots[c] == slot and pos[c] >= 0}
            counted, mask = seen[slot].copy(), inputs[8][t] if len(inputs) > 8 else None
            for i in range(1, int(draws[t]) + 1):
                y[t] = penalized(logits[t], bias[slot], counted, int(tokens[own[i]]), int(pos[own[i]]), mask)
        return [y]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, bias, seen, loops, tokens, pos, slots, draws, *masks = node.inputs
        (n, vocab), n_slots, y = logits.shape, loops.shape[0], node.outputs[0]
        rows = rows_of_texts(node, ctx, n)
        if n > MAX_BATCH_COLUMNS:
            raise PlanError(f"[{self.name}] {node.name}: logits {logits}; expected at most {MAX_BATCH_COLUMNS} columns")
        return [
            by_threads(
                node,
                ctx,
                "sample/penalties.comp",
                (*map(Arg, (logits, bias, seen, loops, tokens, pos)), Arg(y, "w"), *map(Arg, (slots, draws, *masks))),
                (vocab, rows, n_slots, loops.shape[1]),
                vocab,
                {"COLUMNS": 1, "DRAFTS": 1, "MAX_COLUMNS": MAX_BATCH_COLUMNS, **({"MASKED": 1} if masks else {})},
                grid=(n, 1),
                moved=n * (4 * 3 * vocab + 4 * vocab + 4 * len(masks) * mask_words(vocab)),
                flops=5 * logits.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def cases(self) -> Iterator[Case]:
        yield self.build_case(77, 16, seed=1)
        yield self.build_case(77, 64, seed=2)
        yield self.build_case(1000, 64, masked=True, seed=3)
        yield self.build_case(31, 5, length=2, seed=4)
        yield self.build_case(151936, 2, seed=5)

    def full_cases(self) -> Iterator[Case]:
        for vocab, n, masked in product((1, 31, 4096, 32000), (1, 2, 5, 16, 64), (False, True)):
            yield self.build_case(vocab, n, masked=masked)

    def perf_cases(self) -> Iterator[Case]:
        for n in (64, 16):
            yield self.build_case(151936, n, length=500, mixed=False)

    def build_case(self, vocab: int, n: int, length: int = 40, masked: bool = False, mixed: bool = True, seed: int = 1) -> Case:
        """length: tokens of the longest text before the step's own, from the first twenty of the vocabulary, as are the drafts, of which
        each sequence has none to five, in any columns. masked: a third of all tokens stay. mixed: one sequence after the other is of the
        next of KINDS; else all have penalties."""
        if min(vocab, n, length) < 1 or n > MAX_BATCH_COLUMNS:
            raise CaseLineError(
                f"PENALTIES_DRAFTS_COLUMNS: vocab={vocab}, n={n}, length={length}: expected 1 and more, at most {MAX_BATCH_COLUMNS} columns"
            )

        def make(rng: np.random.Generator) -> Problem:
            sequences, slots, draws = shuffled_columns(rng, n, lambda slot: int(rng.integers(1, 7)))
            n_slots, rows = sequences + 1, length + 8
            values: dict[str, Array] = {
                "result_output": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "bias": rng.choice([0.0, 0.0, 2.5], (n_slots, vocab)).astype(np.float32),
                "seen": rng.integers(0, 2, (n_slots, SEEN_COUNTS + vocab + rows)).astype(np.int32),
                "loops": np.zeros((n_slots, LOOP_RING + 5), np.int32),
                "tokens": rng.integers(0, min(20, vocab), n).astype(np.int32),
                "pos": np.zeros(n, np.int32),
                "slots": slots,
                "draws": draws,
            }
            for s in range(sequences):
                kind = KINDS[s % len(KINDS)] if mixed else "penalized"
                text = rng.integers(0, min(20, vocab), 0 if kind == "first" else rng.integers(1, length + 2)).tolist()
                presence, frequency = rng.choice([-0.5, 0.0, 0.25], 2).tolist()
                used = Penalties(float(rng.choice([0.8, 1.0, 1.3])), presence, frequency, int(rng.choice([0, 1, 3, 5, 64])))
                if kind == "unpenalized":
                    used = Penalties(1.0, 0.0, 0.0, 0)
                    values["bias"][s] = 0
                values["seen"][s] = used.words(text, vocab, rows)
                own = np.flatnonzero(values["slots"] == s)
                values["pos"][own] = -1 if kind == "hole" else len(text) - 1 + values["draws"][own]
                if kind == "idle":
                    values["draws"][own] = 0
                elif kind == "stopped":
                    values["loops"][s, 1] = STATUS_EOS
                elif kind == "no_slot":
                    values["slots"][own] = int(rng.choice([-1, n_slots]))
            if masked:
                values["mask"] = np.stack([mask_of(rng.random(vocab) < 1 / 3) for _ in range(n)])
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (Tensor("y", "F32", (n, vocab)),)), values)

        shown = {"vocab": vocab, "n": n, "length": length, "masked": masked, "mixed": mixed, "seed": seed}
        return Case(self.name, shown, make, seed)

"""DRY_DRAFTS: DRY for n columns of one text, the last n - 1 of which are drafts (shaders/sample/dry.comp with DRAFTS).

    y F32 [n, vocab], seen I32 [4 + vocab + n_ctx], loop I32, pos I32 [n], dry I32 [256 + 2 * vocab], tokens I32 [n] -> y in place

It runs between PENALTIES_DRAFTS and SAMPLE_DRAFTS. The text of column c is that of `seen` up to the position of column 0, then the tokens
of columns 0..c. A column without a token (pos -1) stays as it is.

DRY_DRAFTS_COLUMNS does so for n columns of different sequences, between PENALTIES_DRAFTS_COLUMNS and SAMPLE_DRAFTS_COLUMNS: y F32 [n,
vocab], seen, loops and dry [n_slots, ...], pos, slots, draws and tokens I32 [n]. The text of a column is that of its slot up to the
position of the sequence's last token (draws 1), then that token and the drafts (draws 1 + i) up to the column's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, inputs_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import register
from vkback.ops.sampling.dry import Dry, DryOp, breakers_of, dried, dry_words, rows_of_texts, seen_of, text_of
from vkback.ops.sampling.lookup import MAX_COLUMNS
from vkback.ops.sampling.lookup_columns import MAX_BATCH_COLUMNS, shuffled_columns
from vkback.ops.sampling.penalties import SEEN_COUNTS
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING


def _longest(node: Node, y: Tensor) -> Arg:
    """Of each column its own words of the longest repetitions."""
    return Arg(Tensor(f"{node.name}.longest", "I32", y.shape, "counter"), "rw")


@register
class DryDrafts(DryOp):
    """See the module's text."""

    name = "DRY_DRAFTS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, seen, loop, pos, dry, tokens = (np.array(i) for i in inputs)
        y, vocab = logits.astype(np.float64), logits.shape[1]
        before = seen[SEEN_COUNTS + vocab :][: max(pos[0], 0)].tolist()
        for c in range(len(tokens)):
            if loop[1] == STATUS_RUNNING and pos[c] >= 0:
                y[c] = dried(y[c], [*before, *tokens[: c + 1].tolist()], dry)
        return [y]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, seen, loop, pos, dry, tokens = node.inputs
        n, vocab = y.shape
        n_ctx = seen.elements - SEEN_COUNTS - vocab
        if n_ctx < 1 or dry.shape != (dry_words(vocab),) or {pos.shape, tokens.shape} != {(n,)} or n > MAX_COLUMNS:
            raise PlanError(
                f"[DRY_DRAFTS] {node.name}: {y}, {seen}, {dry}, {tokens}: expected a text, {dry_words(vocab)} words, and a token and a "
                f"position for each of at most {MAX_COLUMNS} rows of logits"
            )
        args = (Arg(y, "rw"), *map(Arg, (seen, loop, pos)), Arg(dry, "rw"), Arg(tokens), _longest(node, y))
        return [self._launch(node, ctx, args, (vocab, n_ctx), n, {"DRAFTS": 1})]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100, 200, n=4)
        yield self.build_case(100, 300, n=16, words=2, breakers=3)
        yield self.build_case(100, 1, n=8, words=2)
        yield self.build_case(100, 100, n=4, stopped=True)

    def full_cases(self) -> Iterator[Case]:
        for n in (1, 2, 8, 32):
            yield self.build_case(500, 700, n=n, breakers=n % 4, seed=3)

    def build_case(  # type: ignore[override]  # other parameters
        self, vocab: int, length: int, n: int = 1, words: int = 6, breakers: int = 0, stopped: bool = False, seed: int = 1
    ) -> Case:
        """length: tokens of the text before column 0's; of more than two columns the last has none. words, breakers: as of DRY."""
        if min(vocab - 20, length, words, n) < 1 or n > MAX_COLUMNS:
            raise CaseLineError(f"DRY_DRAFTS: vocab={vocab}, length={length}, n={n}: expected 21, 1 and more, 1 to {MAX_COLUMNS} columns")

        def make(rng: np.random.Generator) -> Problem:
            text = text_of(rng, length + n, words)
            values: dict[str, Array] = {
                "y": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "seen": seen_of(text[:length], vocab, length + n + 2),
                "loop": np.zeros(LOOP_RING + 5, np.int32),
                "pos": length + np.arange(n, dtype=np.int32),
                "dry": Dry(0.8, 1.75, 2, 100000).words(breakers_of(text, vocab, breakers)),
                "tokens": np.array(text[length:], np.int32),
            }
            values["loop"][1] = STATUS_EOS if stopped else STATUS_RUNNING
            if n > 2:
                values["pos"][-1] = -1
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, tensors[:1]), values)

        shown = {"vocab": vocab, "length": length, "n": n, "words": words, "breakers": breakers, "stopped": stopped, "seed": seed}
        return Case(self.name, shown, make, seed)


@register
class DryDraftsColumns(DryOp):
    """See the module's text."""

    name = "DRY_DRAFTS_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, seen, loops, pos, dry, slots, draws, tokens = (np.array(i) for i in inputs)
        y, vocab = logits.astype(np.float64), logits.shape[1]
        for t, slot in enumerate(slots):
            if pos[t] < 0 or not draws[t] or not 0 <= slot < len(loops) or loops[slot, 1] != STATUS_RUNNING:
                continue
            own = {int(draws[c]): int(tokens[c]) for c in range(len(tokens)) if slots[c] == slot and pos[c] >= 0}
            before = seen[slot, SEEN_COUNTS + vocab :][: pos[t] - draws[t] + 1].tolist()
            y[t] = dried(y[t], [*before, *(own[i] for i in range(1, int(draws[t]) + 1))], dry[slot])
        return [y]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, seen, loops, pos, dry, slots, draws, tokens = node.inputs
        (n, vocab), n_slots = y.shape, loops.shape[0]
        n_ctx = rows_of_texts(node)
        if n > MAX_BATCH_COLUMNS:
            raise PlanError(f"[{self.name}] {node.name}: logits {y}; expected at most {MAX_BATCH_COLUMNS} columns")
        inputs = (*map(Arg, (seen, loops, pos)), Arg(dry, "rw"), *map(Arg, (slots, draws, tokens)))
        defines = {"COLUMNS": 1, "DRAFTS": 1, "MAX_COLUMNS": MAX_BATCH_COLUMNS}
        push = (vocab, n_ctx, n_slots, loops.shape[1])
        return [self._launch(node, ctx, (Arg(y, "rw"), *inputs, _longest(node, y)), push, n, defines)]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100, 200, n=5)
        yield self.build_case(100, 300, n=64)
        yield self.build_case(100, 300, n=40, words=2)

    def full_cases(self) -> Iterator[Case]:
        for n in (1, 16, 64):
            yield self.build_case(500, 700, n=n, seed=3)

    def build_case(  # type: ignore[override]  # other parameters
        self, vocab: int, length: int, n: int = 1, words: int = 6, seed: int = 1
    ) -> Case:
        """length: tokens of the longest text before the step's own. Each sequence has none to five drafts, in any columns; one after the
        other is plain, has holes, is without DRY, idle, has stopped."""
        if min(vocab - 20, length, words, n) < 1 or n > MAX_BATCH_COLUMNS:
            raise CaseLineError(
                f"DRY_DRAFTS_COLUMNS: vocab={vocab}, length={length}, n={n}: expected 21, 1 and more, 1 to {MAX_BATCH_COLUMNS} columns"
            )

        def make(rng: np.random.Generator) -> Problem:
            sequences, slots, draws = shuffled_columns(rng, n, lambda slot: int(rng.integers(1, 7)))
            n_slots, n_ctx = sequences + 1, length + 8
            values: dict[str, Array] = {
                "y": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "seen": np.zeros((n_slots, SEEN_COUNTS + vocab + n_ctx), np.int32),
                "loops": np.zeros((n_slots, LOOP_RING + 5), np.int32),
                "pos": np.zeros(n, np.int32),
                "dry": np.zeros((n_slots, dry_words(vocab)), np.int32),
                "slots": slots,
                "draws": draws,
                "tokens": np.zeros(n, np.int32),
            }
            for s in range(sequences):
                before = int(rng.integers(1, length + 1))
                text = text_of(rng, before + 6, words)
                values["seen"][s] = seen_of(text[:before], vocab, n_ctx)
                own = np.flatnonzero(values["slots"] == s)
                places = before - 1 + values["draws"][own]
                values["tokens"][own] = np.array(text)[places]
                values["pos"][own] = -1 if s % 8 == 1 else places
                values["loops"][s, 1] = STATUS_EOS if s % 8 == 7 else STATUS_RUNNING
                used = Dry(0.0 if s % 8 == 3 else 0.7, 1.5, int(rng.integers(1, 4)), int(rng.choice([length, 50])))
                values["dry"][s] = used.words(breakers_of(text, vocab, s % 4))
                if s % 8 == 5:
                    values["draws"][own] = 0
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, tensors[:1]), values)

        return Case(self.name, {"vocab": vocab, "length": length, "n": n, "words": words, "seed": seed}, make, seed)

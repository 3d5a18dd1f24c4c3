"""PENALTIES_COLUMNS: PENALTIES for n columns of different sequences (shaders/sample/penalties.comp with COLUMNS).

    logits F32 [n, vocab], bias F32 [n_slots, vocab], seen I32 [n_slots, 4 + vocab + max_rows], loops I32 [n_slots, 32 + capacity],
    tokens, pos, slots, draws I32 [n] (, mask I32 [n_slots, ceil(vocab / 32)]) -> y F32 [n, vocab], seen in place

It runs between the logits and SAMPLE_COLUMNS, whose columns these are: column t has the bias, text, loop and mask of slot slots[t], each as
of PENALTIES. The logits of a column that picks nothing (a hole, one that does not draw, one whose sequence has stopped or whose slot is
none) pass through, and it counts nothing: tokens of a prompt stand in `seen` before its first token is picked. A sequence without penalties
has last_n 0 and no bias; its logits then pass as they are.
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
from vkback.ops.storage import nbytes

KINDS = ("penalized", "hole", "penalized", "idle", "penalized", "stopped", "unpenalized", "no_slot", "penalized", "first")
"""What a case's columns are like, one after the other: with penalties; a hole; it does not draw; its sequence has stopped; without
penalties; its slot is none; the first token of its text."""


def rows_of_texts(node: Node, ctx: LowerContext, n_masks: int) -> int:
    """Rows of the texts that `seen` has, of a PENALTIES_COLUMNS or the one with drafts. n_masks: how many masks there are, if any.
    Raises PlanError for shapes that do not fit each other, and for what the device cannot bind."""
    logits, bias, seen, loops, tokens, pos, slots, draws, *masks = node.inputs
    (n, vocab), n_slots = logits.shape, loops.shape[0]
    rows = seen.shape[-1] - SEEN_COUNTS - vocab
    if bias.shape != (n_slots, vocab) or seen.shape[:-1] != (n_slots,) or rows < 1 or len(loops.shape) != 2:
        raise PlanError(
            f"[{node.op}] {node.name}: {logits}, {bias}, {seen}, {loops}: expected for each of {n_slots} slots {vocab} biases, "
            f"and in seen {SEEN_COUNTS} words, as many counts, and the text"
        )
    if wrong := [t for t in (tokens, pos, slots, draws) if t.shape != (n,)]:
        raise PlanError(f"[{node.op}] {node.name}: {wrong[0]} beside logits {logits}; expected a value for each of {n} columns")
    if [m.shape for m in masks] not in ([], [(n_masks, mask_words(vocab))]):
        raise PlanError(f"[{node.op}] {node.name}: expected one mask of {n_masks} times {mask_words(vocab)} words or none, got {masks}")
    for t in (logits, bias, seen, *masks):
        if nbytes(t) > ctx.caps.max_storage_buffer_range:
            raise PlanError(
                f"[{node.op}] {t}: {nbytes(t)} bytes, {ctx.caps.name} binds at most {ctx.caps.max_storage_buffer_range} "
                f"(maxStorageBufferRange); take fewer {'columns' if t is logits else 'slots'}"
            )
    return rows


@register
class PenaltiesColumns(Op):
    """See the module's text."""

    name = "PENALTIES_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, bias, seen, loops, tokens, pos, slots, draws = (np.array(i) for i in inputs[:8])
        y = logits.astype(np.float64)
        for t, slot in enumerate(slots):
            if pos[t] >= 0 and draws[t] and 0 <= slot < len(loops) and loops[slot, 1] == STATUS_RUNNING:
                mask = inputs[8][slot] if len(inputs) > 8 else None
                y[t] = penalized(logits[t], bias[slot], seen[slot], int(tokens[t]), int(pos[t]), mask)
        return [y, seen]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, bias, seen, loops, tokens, pos, slots, draws, *masks = node.inputs
        (n, vocab), n_slots, y = logits.shape, loops.shape[0], node.outputs[0]
        rows = rows_of_texts(node, ctx, n_slots)
        each = (logits, bias, y)
        return [
            by_threads(
                node,
                ctx,
                "sample/penalties.comp",
                (Arg(logits), Arg(bias), Arg(seen, "rw"), *map(Arg, (loops, tokens, pos)), Arg(y, "w"), *map(Arg, (slots, draws, *masks))),
                (vocab, rows, n_slots, loops.shape[1]),
                vocab,
                {"COLUMNS": 1, **({"MASKED": 1} if masks else {})},
                grid=(n, 1),
                moved=n * (4 * len(each) * vocab + 8 * vocab + 4 * len(masks) * mask_words(vocab)),
                flops=5 * logits.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1000, 1)
        yield self.build_case(77, 16)
        yield self.build_case(77, 16, masked=True)
        yield self.build_case(1000, 64, masked=True)
        yield self.build_case(151936, 2)

    def full_cases(self) -> Iterator[Case]:
        for vocab, n, masked in product((1, 31, 4096, 32000), (1, 2, 5, 16, 64, 100), (False, True)):
            yield self.build_case(vocab, n, masked=masked)
        yield self.build_case(151936, 16, masked=True)

    def perf_cases(self) -> Iterator[Case]:
        for n in (64, 8, 1):
            yield self.build_case(151936, n, length=500, mixed=False)

    def build_case(self, vocab: int, n: int, length: int = 40, masked: bool = False, mixed: bool = True, seed: int = 1) -> Case:
        """length: tokens of the longest text before the step's own, from the first twenty of the vocabulary. masked: a third of all tokens
        stay. mixed: one column after the other is of the next of KINDS; else all have penalties."""
        if min(vocab, n, length) < 1:
            raise CaseLineError(f"PENALTIES_COLUMNS: vocab={vocab}, n={n}, length={length}: expected 1 and more")

        def make(rng: np.random.Generator) -> Problem:
            n_slots, rows = n + 2, length + 3
            values: dict[str, Array] = {
                "result_output": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "bias": rng.choice([0.0, 0.0, 2.5], (n_slots, vocab)).astype(np.float32),
                "seen": rng.integers(0, 2, (n_slots, SEEN_COUNTS + vocab + rows)).astype(np.int32),
                "loops": np.zeros((n_slots, LOOP_RING + 5), np.int32),
                "tokens": np.zeros(n, np.int32),
                "pos": np.zeros(n, np.int32),
                "slots": rng.permutation(n_slots)[:n].astype(np.int32),
                "draws": np.ones(n, np.int32),
            }
            for t, slot in enumerate(values["slots"].tolist()):
                kind = KINDS[t % len(KINDS)] if mixed else "penalized"
                *text, token = rng.integers(0, min(20, vocab), 1 if kind == "first" else rng.integers(2, length + 2)).tolist()
                presence, frequency = rng.choice([-0.5, 0.0, 0.25], 2).tolist()
                used = Penalties(float(rng.choice([0.8, 1.0, 1.3])), presence, frequency, int(rng.choice([0, 1, 5, 64])))
                if kind == "unpenalized":
                    used = Penalties(1.0, 0.0, 0.0, 0)
                    values["bias"][slot] = 0
                values["seen"][slot] = used.words(text, vocab, rows)
                values["tokens"][t], values["pos"][t] = token, len(text)
                if kind == "hole":
                    values["pos"][t] = -1
                elif kind == "idle":
                    values["draws"][t] = 0
                elif kind == "stopped":
                    values["loops"][slot, 1] = STATUS_EOS
                elif kind == "no_slot":
                    values["slots"][t] = rng.choice([-1, n_slots])
            if masked:
                values["mask"] = np.stack([mask_of(rng.random(vocab) < 1 / 3) for _ in range(n_slots)])
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (Tensor("y", "F32", (n, vocab)), tensors[2])), values)

        shown = {"vocab": vocab, "n": n, "length": length, "masked": masked, "mixed": mixed, "seed": seed}
        return Case(self.name, shown, make, seed)

"""PENALTIES (shaders/sample/penalties.comp): a bias for each token's logit, and penalties for tokens that the text has lately had.

    logits F32 [1, vocab], bias F32 [vocab], seen I32 [4 + vocab + n_ctx], loop I32, tokens I32 [1], pos I32 [1]
    (, mask I32 [ceil(vocab / 32)]) -> y F32 [1, vocab], seen in place

It runs between the logits and SAMPLE. Words of `seen`: 0..3 repetition, presence and frequency penalty F32, last_n; then how often each
token stands among the last last_n of the text before this step, then the tokens by position. A step counts its own token, tokens[0] at
pos[0], in and the one that leaves the window out. Then

    x = logits + bias
    of a token counted c > 0 times: x / repetition where x > 0, else x * repetition; less presence + frequency * c

With a mask, tokens whose bit (id % 32 of word id / 32) is 0 get -inf. A loop that has stopped (word 1 of `loop`) counts nothing more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance, inputs_of
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.sampling.sample import LOOP_RING
from vkback.ops.storage import nbytes

SEEN_COUNTS = 4
"""Where the counts begin in `seen`."""


def mask_words(vocab: int) -> int:
    """Words of a mask of so many tokens."""
    return ceil_div(vocab, 32)


def mask_of(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The mask that lets these tokens through, bool [vocab] -> int32 [ceil(vocab / 32)]."""
    padded = np.zeros(32 * mask_words(len(allowed)), np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class Penalties:
    """repetition 1, presence 0, frequency 0: none. last_n: tokens of the text that count, the latest ones."""

    repetition: float
    presence: float
    frequency: float
    last_n: int

    @classmethod
    def read(cls, seen: Array) -> Penalties:
        return cls(*struct.unpack("<fffi", np.asarray(seen[:SEEN_COUNTS], np.int32).tobytes()))

    def words(self, text: Sequence[int], vocab: int, n_ctx: int) -> npt.NDArray[np.int32]:
        """`seen` before the step after `text`, int32 [4 + vocab + n_ctx]."""
        seen = np.zeros(SEEN_COUNTS + vocab + n_ctx, np.int32)
        seen[:SEEN_COUNTS] = np.frombuffer(struct.pack("<fffi", self.repetition, self.presence, self.frequency, self.last_n), np.int32)
        window = np.asarray(text[max(0, len(text) - self.last_n) :], np.int64)
        seen[SEEN_COUNTS : SEEN_COUNTS + vocab] = np.bincount(window, minlength=vocab)
        seen[SEEN_COUNTS + vocab :][: len(text)] = text
        return seen


def penalized(logits: Array, bias: Array, seen: Array, token: int, pos: int, mask: Array | None, count: bool = True) -> Array:
    """The logits of one text, float64 [vocab]; counts the step's token in `seen`, in place, unless `count` is off."""
    vocab = logits.shape[-1]
    used = Penalties.read(seen)
    counts, places = seen[SEEN_COUNTS:][:vocab], seen[SEEN_COUNTS + vocab :]
    if count:
        counts[token] += 1
        places[pos] = token
        if pos >= used.last_n:
            counts[places[pos - used.last_n]] -= 1
    x = logits.astype(np.float64) + bias
    lately = np.where(x > 0, x / used.repetition, x * used.repetition) - used.presence - used.frequency * counts
    y = np.where(counts > 0, lately, x)
    if mask is not None:
        y = np.where(np.unpackbits(np.asarray(mask, np.int32).view(np.uint8), bitorder="little")[:vocab], y, -np.inf)
    return y


TOLERANCE = Tolerance(1e-12, 1e-6, "five f32 operations, one of them a division of 2.5 ulp; counts are integers")


@register
class PenaltiesOp(Op):
    """See the module's text."""

    name = "PENALTIES"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, bias, seen, loop, tokens, pos = (np.array(i) for i in inputs[:6])
        mask = inputs[6] if len(inputs) > 6 else None
        y = penalized(logits[0], bias, seen, int(tokens[0]), int(pos[0]), mask, count=loop[1] == 0)
        return [y[None], seen]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, bias, seen, loop, tokens, pos, *masks = node.inputs
        vocab = logits.elements
        n_ctx = seen.elements - SEEN_COUNTS - vocab
        if logits.shape[0] != 1 or bias.shape != (vocab,) or n_ctx < 1:
            raise PlanError(
                f"[PENALTIES] {node.name}: {logits}, {bias}, {seen}: expected one row of logits, as many biases, and in seen "
                f"{SEEN_COUNTS} words, as many counts, and the text"
            )
        if [m.elements for m in masks] not in ([], [mask_words(vocab)]):
            raise PlanError(f"[PENALTIES] {node.name}: expected one mask of {mask_words(vocab)} words or none, got {masks}")
        y = node.outputs[0]
        return [
            by_threads(
                node,
                ctx,
                "sample/penalties.comp",
                (Arg(logits), Arg(bias), Arg(seen, "rw"), Arg(loop), Arg(tokens), Arg(pos), Arg(y, "w"), *map(Arg, masks)),
                (vocab, n_ctx),
                vocab,
                {"MASKED": 1} if masks else {},
                grid=(1, 1),
                moved=nbytes(logits) + nbytes(bias) + 8 * vocab + nbytes(y) + sum(map(nbytes, masks)),
                flops=5 * vocab,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1000, 1.3, 0.5, 0.25, 16, 40)
        yield self.build_case(1000, 1.0, 0.0, 0.0, 64, 40)
        yield self.build_case(1000, 1.5, 0.0, 0.0, 0, 40)
        yield self.build_case(77, 0.8, -0.5, 0.1, 64, 100)
        yield self.build_case(77, 1.3, 0.5, 0.25, 5, 0)
        yield self.build_case(77, 1.3, 0.5, 0.25, 5, 40, masked=True)
        yield self.build_case(1000, 1.0, 0.0, 0.0, 0, 40, masked=True)

    def full_cases(self) -> Iterator[Case]:
        for vocab, last_n, length in ((1, 1, 3), (4096, 64, 500), (151936, 256, 500)):
            for masked in (False, True):
                yield self.build_case(vocab, 1.1, 0.3, 0.2, last_n, length, masked=masked)

    def build_case(
        self,
        vocab: int,
        repetition: float,
        presence: float,
        frequency: float,
        last_n: int,
        length: int,
        masked: bool = False,
        seed: int = 1,
    ) -> Case:
        """length: tokens of the text before the step's own, from the first twenty of the vocabulary. masked: a third of all tokens stay."""

        def make(rng: np.random.Generator) -> Problem:
            n_ctx = length + 3
            text = rng.integers(0, min(20, vocab), length + 1)
            seen = Penalties(repetition, presence, frequency, last_n).words(text[:-1].tolist(), vocab, n_ctx)
            values: dict[str, Array] = {
                "result_output": (3 * rng.standard_normal((1, vocab))).astype(np.float32),
                "bias": rng.choice([0.0, 0.0, 2.5], vocab).astype(np.float32),
                "seen": seen,
                "loop": np.zeros(LOOP_RING + 5, np.int32),
                "tokens": text[-1:].astype(np.int32),
                "pos": np.full(1, length, np.int32),
            }
            if masked:
                values["mask"] = mask_of(rng.random(vocab) < 1 / 3)
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (Tensor("y", "F32", (1, vocab)), tensors[2])), values)

        shown = {
            "vocab": vocab,
            "repetition": repetition,
            "presence": presence,
            "frequency": frequency,
            "last_n": last_n,
            "length": length,
            "masked": masked,
            "seed": seed,
        }
        return Case(self.name, shown, make, seed)

"""DRY: tokens that would lengthen a repetition of the text's end lose of their logits (shaders/sample/dry.comp).

    y F32 [1, vocab], seen I32 [4 + vocab + n_ctx], loop I32, pos I32 [1], dry I32 [256 + 2 * vocab] -> y, dry in place

DRY_COLUMNS does so for n columns of different sequences: y F32 [n, vocab], seen, loops and dry [n_slots, ...], pos I32 [n], and slots and
draws, I32 [n], behind them.

It runs between PENALTIES, which notes the step's token in `seen`, and SAMPLE. Where the text ends in a sequence of n tokens, at least
allowed_length of them, that stands earlier in its last last_n tokens with a token behind it, that token's logit loses
multiplier * base ** (n - allowed_length), n being its longest such sequence, and 64 where it is longer. A sequence does not reach over one
that breaks repetitions, nor loses a token that breaks one alone.

Words of `dry`: 0 multiplier F32 (0: nothing happens), 1 base F32, 2 allowed_length, 3 last_n; 8.. tails of 8 words, how many tokens and
which; 256.. for each token as what it breaks repetitions: bit 0 alone, bit 1 + i as the head of tail i; then a word for each token that the
kernel leaves at 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.graph import Node
from vkback.ops.case import Array, Case, Problem, Tolerance, inputs_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.sampling.penalties import SEEN_COUNTS
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

TAILS, TAIL_WORDS, MAX_TAILS, BREAKERS = 8, 8, 31, 256

LONGEST = 64
"""Tokens of a repetition that count, at most."""


@dataclass(frozen=True)
class Breakers:
    """What breaks repetitions: for each token a word, bit 0: alone, bit 1 + i: before tails[i]."""

    words: npt.NDArray[np.int32]
    tails: tuple[tuple[int, ...], ...] = ()


def dry_words(vocab: int) -> int:
    """Words of `dry`, of one text."""
    return BREAKERS + 2 * vocab


@dataclass(frozen=True)
class Dry:
    """multiplier 0: none. last_n: tokens of the text that count, the latest ones."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int

    def words(self, breakers: Breakers) -> npt.NDArray[np.int32]:
        """Int32 [256 + 2 * vocab]."""
        vocab = len(breakers.words)
        words = np.zeros(dry_words(vocab), np.int32)
        words[:4] = np.frombuffer(struct.pack("<ffii", self.multiplier, self.base, self.allowed_length, self.last_n), np.int32)
        for i, tail in enumerate(breakers.tails):
            words[TAILS + TAIL_WORDS * i :][: len(tail) + 1] = (len(tail), *tail)
        words[BREAKERS:][:vocab] = breakers.words
        return words

    @classmethod
    def read(cls, words: Array) -> tuple[Dry, Breakers]:
        vocab = (len(words) - BREAKERS) // 2
        rows = np.asarray(words[TAILS : TAILS + TAIL_WORDS * MAX_TAILS]).reshape(MAX_TAILS, TAIL_WORDS)
        tails = tuple(tuple(row[1 : 1 + row[0]].tolist()) for row in rows)
        settings = cls(*struct.unpack("<ffii", np.asarray(words[:4], np.int32).tobytes()))
        return settings, Breakers(np.asarray(words[BREAKERS:][:vocab]), tails)


def repetitions(text: Sequence[int], dry: Dry, breakers: Breakers) -> dict[int, int]:
    """Tokens that would lengthen a repetition of a text's end, and the longest of each."""
    text = list(text)[max(0, len(text) - dry.last_n) :]
    if len(text) <= dry.allowed_length:
        return {}
    reach = len(text)
    for place in reversed(range(len(text))):
        word = int(breakers.words[text[place]])
        ends = [1] if word & 1 else []
        ends += [
            len(tail) + 1
            for i, tail in enumerate(breakers.tails)
            if word >> (i + 1) & 1 and place + len(tail) < len(text) and tuple(text[place + 1 : place + 1 + len(tail)]) == tail
        ]
        if ends:
            reach = len(text) - place - max(ends)
            break
    most = min(reach, LONGEST)
    found: dict[int, int] = {}
    if most < dry.allowed_length:
        return found
    for place in range(len(text) - 1):
        same = 0
        while same < most and same <= place and text[place - same] == text[-1 - same]:
            same += 1
        if same >= max(dry.allowed_length, 1):
            found[text[place + 1]] = max(same, found.get(text[place + 1], 0))
    return {token: n for token, n in found.items() if not breakers.words[token] & 1}


def dried(y: Array, text: Sequence[int], words: Array) -> Array:
    """Logits of one text after DRY, float64 [vocab]."""
    dry, breakers = Dry.read(words)
    y = np.array(y, np.float64)
    if dry.multiplier:
        for token, same in repetitions(text, dry, breakers).items():
            y[token] -= dry.multiplier * np.exp(min((same - dry.allowed_length) * np.log(dry.base), 80.0))
    return y


TOLERANCE = Tolerance(1e-9, 1e-4, "f32's log and exp of up to 62 times the base's logarithm; the largest penalty decides the rms")


def _text(seen: Array, vocab: int, length: int) -> list[int]:
    return [int(t) for t in seen[SEEN_COUNTS + vocab :][:length]]


@register
class DryOp(Op):
    """See the module's text."""

    name = "DRY"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        y, seen, loop, pos, dry = (np.array(i) for i in inputs)
        if loop[1] == STATUS_RUNNING:
            y = dried(y[0], _text(seen, y.shape[-1], int(pos[0]) + 1), dry)[None]
        return [y, dry]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, seen, loop, pos, dry = node.inputs
        vocab = y.elements
        n_ctx = seen.elements - SEEN_COUNTS - vocab
        if y.shape[0] != 1 or n_ctx < 1 or dry.shape != (dry_words(vocab),):
            raise PlanError(f"[DRY] {node.name}: {y}, {seen}, {dry}: expected one row of logits, a text, and {dry_words(vocab)} words")
        args = (Arg(y, "rw"), Arg(seen), Arg(loop), Arg(pos), Arg(dry, "rw"))
        return [self._launch(node, ctx, args, (vocab, n_ctx), 1, {})]

    @staticmethod
    def _launch(node: Node, ctx: LowerContext, args: Sequence[Arg], push: Sequence[int], n: int, defines: dict[str, int]) -> Dispatch:
        """One workgroup a column."""
        choice = ctx.tuning.pick("elementwise", elements=push[1])
        wg = workgroup_size(ctx.caps, choice["wg_size"], push[1])
        reason = f"{wg} threads: {choice.source}"
        kernel = Variant.of("sample/dry.comp", {**defines, "WG_SIZE": wg})
        return Dispatch(kernel, tuple(args), pack_push(*push), (1, n, 1), node.op, node.name, reason, nbytes=8 * n * push[1])

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return TOLERANCE

    def cases(self) -> Iterator[Case]:
        yield self.build_case(500, 200)
        yield self.build_case(500, 1000, words=3)
        yield self.build_case(500, 300, words=2, last_n=40)
        yield self.build_case(500, 200, breakers=1)
        yield self.build_case(500, 200, breakers=3)
        yield self.build_case(500, 200, allowed=5, words=4)
        yield self.build_case(500, 200, multiplier=0.0)
        yield self.build_case(500, 200, stopped=True)
        yield self.build_case(500, 1)
        yield self.build_case(500, 300, words=1)
        yield self.build_case(151936, 2000, breakers=1)

    def full_cases(self) -> Iterator[Case]:
        for length in (2, 7, 64, 65, 999, 4000):
            for breakers in range(4):
                yield self.build_case(777, length, breakers=breakers, seed=2)

    def build_case(
        self,
        vocab: int,
        length: int,
        multiplier: float = 0.8,
        base: float = 1.75,
        allowed: int = 2,
        last_n: int = 100000,
        words: int = 6,
        breakers: int = 0,
        stopped: bool = False,
        seed: int = 1,
    ) -> Case:
        """length: tokens of the text, which repeats so many short sequences. breakers: 0: none; 1: a token; 2: and one before a tail of
        one; 3: and one before a tail of two."""
        if min(vocab - 20, length, words) < 1:
            raise CaseLineError(f"DRY: vocab={vocab}, length={length}, words={words}: expected 21 and more, 1 and more, 1 and more")

        def make(rng: np.random.Generator) -> Problem:
            text = text_of(rng, length, words)
            values: dict[str, Array] = {"y": (3 * rng.standard_normal((1, vocab))).astype(np.float32)}
            values |= {"seen": seen_of(text, vocab, length + 3), "loop": np.zeros(LOOP_RING + 5, np.int32)}
            values["loop"][1] = STATUS_EOS if stopped else STATUS_RUNNING
            values["pos"] = np.array([length - 1], np.int32)
            values["dry"] = Dry(multiplier, base, allowed, last_n).words(breakers_of(text, vocab, breakers))
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (tensors[0], tensors[4])), values)

        shown = {"vocab": vocab, "length": length, "multiplier": multiplier, "base": base, "allowed": allowed, "last_n": last_n}
        return Case(self.name, shown | {"words": words, "breakers": breakers, "stopped": stopped, "seed": seed}, make, seed)


def text_of(rng: np.random.Generator, length: int, words: int) -> list[int]:
    """A text of so many tokens below 20, made of a few sequences that come again and again."""
    parts = [rng.integers(0, 20, rng.integers(1, 6)).tolist() for _ in range(words)]
    text: list[int] = []
    while len(text) < length:
        text += parts[rng.integers(words)]
    return text[:length]


def seen_of(text: Sequence[int], vocab: int, n_ctx: int) -> npt.NDArray[np.int32]:
    """PENALTIES's `seen` of a text, without counts, which DRY does not read."""
    seen = np.zeros(SEEN_COUNTS + vocab + n_ctx, np.int32)
    seen[SEEN_COUNTS + vocab :][: len(text)] = text
    return seen


def breakers_of(text: Sequence[int], vocab: int, kind: int) -> Breakers:
    """Those of a case, made of the middle of its text."""
    words, middle = np.zeros(vocab, np.int32), len(text) // 2
    tails = tuple(tuple(text[middle + 1 : middle + 1 + n]) for n in range(1, kind))
    if kind:
        words[text[middle // 2]] |= 1
    for i in range(len(tails)):
        words[text[middle]] |= 2 << i
    return Breakers(words, tails)


def rows_of_texts(node: Node) -> int:
    """Rows of the texts that `seen` has, of a DRY_COLUMNS or the one with drafts. Raises PlanError for shapes that do not fit."""
    y, seen, loops, pos, dry, *columns = node.inputs
    (n, vocab), n_slots = y.shape, loops.shape[0]
    n_ctx = seen.shape[-1] - SEEN_COUNTS - vocab
    if wrong := [t for t in (pos, *columns) if t.shape != (n,)]:
        raise PlanError(f"[{node.op}] {node.name}: {wrong[0]} beside logits {y}; expected a value for each of {n} columns")
    if n_ctx < 1 or seen.shape[0] != n_slots or dry.shape != (n_slots, dry_words(vocab)):
        raise PlanError(f"[{node.op}] {node.name}: {seen}, {dry}: expected a text and {dry_words(vocab)} words of {n_slots} slots")
    return n_ctx


@register
class DryColumns(DryOp):
    """DRY of n columns."""

    name = "DRY_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        y, seen, loops, pos, dry, slots, draws = (np.array(i) for i in inputs)
        y = y.astype(np.float64)
        for t, slot in enumerate(slots):
            if pos[t] >= 0 and draws[t] and 0 <= slot < len(loops) and loops[slot, 1] == STATUS_RUNNING:
                y[t] = dried(y[t], _text(seen[slot], y.shape[-1], int(pos[t]) + 1), dry[slot])
        return [y, dry]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        y, seen, loops, pos, dry, slots, draws = node.inputs
        (n, vocab), n_slots = y.shape, loops.shape[0]
        n_ctx = rows_of_texts(node)
        args = (Arg(y, "rw"), *map(Arg, (seen, loops, pos)), Arg(dry, "rw"), Arg(slots), Arg(draws))
        return [self._launch(node, ctx, args, (vocab, n_ctx, n_slots, loops.shape[1]), n, {"COLUMNS": 1})]

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100, 200, n=1)
        yield self.build_case(100, 300, n=7)
        yield self.build_case(100, 300, n=20, words=2)

    def full_cases(self) -> Iterator[Case]:
        for n in (2, 16, 64):
            yield self.build_case(500, 700, n=n, seed=3)

    def build_case(  # type: ignore[override]  # other parameters
        self, vocab: int, length: int, n: int = 1, words: int = 6, seed: int = 1
    ) -> Case:
        """length: tokens of the longest text. Of columns, one after the other is plain, a hole, without DRY, idle, stopped."""
        if min(vocab - 20, length, words, n) < 1:
            raise CaseLineError(f"DRY_COLUMNS: vocab={vocab}, length={length}, words={words}, n={n}: expected 21, 1, 1, 1 and more")

        def make(rng: np.random.Generator) -> Problem:
            n_slots, n_ctx = n + 2, length + 3
            values: dict[str, Array] = {
                "y": (3 * rng.standard_normal((n, vocab))).astype(np.float32),
                "seen": np.zeros((n_slots, SEEN_COUNTS + vocab + n_ctx), np.int32),
                "loops": np.zeros((n_slots, LOOP_RING + 5), np.int32),
                "pos": np.zeros(n, np.int32),
                "dry": np.zeros((n_slots, dry_words(vocab)), np.int32),
                "slots": rng.permutation(n_slots)[:n].astype(np.int32),
                "draws": np.ones(n, np.int32),
            }
            for t, slot in enumerate(values["slots"].tolist()):
                text = text_of(rng, int(rng.integers(1, length + 1)), words)
                values["seen"][slot] = seen_of(text, vocab, n_ctx)
                values["pos"][t] = -1 if t % 8 == 1 else len(text) - 1
                values["draws"][t] = t % 8 != 5
                values["loops"][slot, 1] = STATUS_EOS if t % 8 == 7 else STATUS_RUNNING
                used = Dry(0.0 if t % 8 == 3 else 0.7, 1.5, int(rng.integers(1, 4)), int(rng.choice([length, 50])))
                values["dry"][slot] = used.words(breakers_of(text, vocab, t % 4))
            tensors = inputs_of(values)
            return Problem(Node(self.name, tensors, (tensors[0], tensors[4])), values)

        return Case(self.name, {"vocab": vocab, "length": length, "n": n, "words": words, "seed": seed}, make, seed)

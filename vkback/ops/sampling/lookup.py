"""LOOKUP (shaders/sample/lookup.comp): drafts of the next tokens of a text, found in the text itself or given beforehand.

    text I32 [before + n_ctx], draft I32 [96], loop I32 [32 + capacity], tokens I32 [n], pos I32 [n] -> text, draft, tokens, pos in place
    params: before, capacity

It begins a step of n columns, the last of which is SAMPLE_DRAFTS. Column 0 is the text's last token at its position; LOOKUP fills the
others with what may come: tokens[c] at pos[c] = pos[0] + c, or pos[c] = -1 where there is no draft. A loop that has stopped (word 1) has no
columns at all. Of SAMPLE's `loop` word 2 limits the tokens to make (0: no limit): no draft lies behind it.

`text` has the token of position q at before + q; tokens that the loop made since the last step are brought there from its ring. The first
`before` words are earlier texts, each with -1 behind it, the last one up to the end of these words.

The draft is what followed the longest match: the place whose tokens, read backwards, agree with the text's end in the most tokens (up to
32, at least MATCH); of equal ones the latest. Where a match overlaps the end the draft goes on with its own copy. A draft ends before -1.

Words of `draft`:

    0 FIRST     word of `text` from which on it is read
    1 MADE      tokens of the loop that stand in `text`
    2 MODE      0: as above; 1: the draft of position q is word q of `text`, -1 or none from `before` on: for tests and measurements;
                2: that of column c is word c - 1: a draft model has put it there
    3, 4 MOST, LEAST   drafts of a step at most; where there are fewer than LEAST, there are none
    5 MATCH     tokens that a match must have
    8, 9, 10    steps, drafts and accepted drafts so far; 16.. drafts by place (0: column 1), 48.. accepted ones: SAMPLE_DRAFTS counts
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
from vkback.ops.family import POWERS, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

DRAFT_WORDS = 96
FIRST, MADE, MODE, MOST, LEAST, MATCH = 0, 1, 2, 3, 4, 5
STEPS, DRAFTED, ACCEPTED = 8, 9, 10
DRAFTED_AT, ACCEPTED_AT = 16, 48
"""Words of `draft`."""

FROM_TEXT, KNOWN, MODEL = 0, 1, 2
"""Values of MODE."""

MAX_COLUMNS = 32
LOOP_LIMIT = 2
LONGEST = 32
"""Tokens of a match that count."""

MAX_WORDS = 2**26
"""Of a text: a place and the length of its match are one word."""

declare("lookup", match={"n_ctx": "number"}, params={"wg_size": POWERS})


def match_of(text: Array, first: int, own: int, least: int) -> tuple[int, int]:
    """Where the longest earlier copy of a text's end has its last token, and how many tokens it has; (0, 0) where there is none.

    text   int [L], earlier texts and the own one; first: the word from which on it is read; own: where the own one begins
    """
    end = len(text)
    best = (0, 0)
    for place in np.flatnonzero(text[first : end - 1] == text[-1]).tolist():
        i = first + place
        reach = min(LONGEST, end - own, place + 1)
        here, there = text[i - reach + 1 : i + 1][::-1], text[end - reach :][::-1]
        differ = np.flatnonzero(here != there)
        length = int(differ[0]) if len(differ) else reach
        if length >= max(least, 1) and length >= best[1]:
            best = (i, length)
    return best


def drafts_of(text: Array, first: int, own: int, least: int, count: int) -> list[int]:
    """At most so many tokens that may follow."""
    place, length = match_of(text, first, own, least)
    if not length:
        return []
    period = len(text) - 1 - place
    found: list[int] = []
    for c in range(count):
        token = int(text[place + 1 + c % period])
        if token < 0:
            break
        found.append(token)
    return found


KINDS = ("copy", "none", "repeat", "earlier", "separator", "known", "known_end", "model", "stopped", "limit", "least", "long")
"""What a case's text is like: its end stands earlier in it; no token comes twice; it repeats its last tokens; its end stands in an
earlier text; that text ends soon; drafts are given by position; they end within `before`; they are given by column; the loop has stopped;
the limit is near; there are fewer drafts than LEAST; the match is longer than what counts."""


@register
class Lookup(Op):
    """See the module's text."""

    name = "LOOKUP"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        text, draft, loop, tokens, pos = (np.array(i) for i in inputs)
        before, capacity = params["before"], params["capacity"]
        n, at, step = len(tokens), int(pos[0]), int(loop[0])
        if loop[1] != STATUS_RUNNING or at < 0:
            pos[:] = -1
            return [text, draft, tokens, pos]
        for s in range(int(draft[MADE]), step):
            text[before + at - step + 1 + s] = loop[LOOP_RING + s % capacity]
        draft[MADE] = step
        room = min(n - 1, int(draft[MOST]))
        if loop[LOOP_LIMIT] > 0:
            room = min(room, int(loop[LOOP_LIMIT]) - step - 1)
        if draft[MODE] in (KNOWN, MODEL):
            begin = at + 1 if draft[MODE] == KNOWN else 0
            given = text[min(begin, before) : min(begin + n - 1, before)]
            ended = np.flatnonzero(given < 0)
            whole = given.tolist()
            found = whole[: int(ended[0]) if len(ended) else len(whole)]
            shown = [max(t, 0) for t in whole]
        else:
            found = drafts_of(text[: before + at + 1], int(draft[FIRST]), before, int(draft[MATCH]), n - 1) if room > 0 else []
            shown = self._shown(text[: before + at + 1], draft, before, n) if room > 0 else []
        count = max(min(len(found), room), 0)
        if count < draft[LEAST]:
            count = 0
        tokens[1:] = (shown + [0] * n)[: n - 1]
        pos[1:] = -1
        pos[1 : 1 + count] = at + 1 + np.arange(count)
        return [text, draft, tokens, pos]

    def _shown(self, text: Array, draft: Array, before: int, n: int) -> list[int]:
        """Tokens of the columns, also of those without a draft: ids that the vocabulary has."""
        place, length = match_of(text, int(draft[FIRST]), before, int(draft[MATCH]))
        period = len(text) - 1 - place
        return [max(int(text[place + 1 + c % period]), 0) for c in range(n - 1)] if length else []

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        text, draft, loop, tokens, pos = node.inputs
        before, capacity = node.params["before"], node.params["capacity"]
        n = tokens.elements
        if loop.shape != (LOOP_RING + capacity,) or draft.shape != (DRAFT_WORDS,) or not 0 <= before < text.elements <= MAX_WORDS:
            raise PlanError(
                f"[LOOKUP] {node.name}: {text}, {draft}, {loop}, {before} words before; expected at most {MAX_WORDS} words of text, more "
                f"than those before, {DRAFT_WORDS} of draft and {LOOP_RING + capacity} of a loop with a ring of {capacity}"
            )
        if tokens.shape != pos.shape or not 1 <= n <= MAX_COLUMNS:
            raise PlanError(f"[LOOKUP] {node.name}: {tokens}, {pos}; expected as many of both, at most {MAX_COLUMNS}")
        choice = ctx.tuning.pick("lookup", n_ctx=text.elements - before)
        wg = workgroup_size(ctx.caps, choice["wg_size"], text.elements)
        return [
            Dispatch(
                kernel=Variant("sample/lookup.comp", (("WG_SIZE", wg),)),
                args=(Arg(text, "rw"), Arg(draft, "rw"), Arg(loop), Arg(tokens, "rw"), Arg(pos, "rw")),
                push=pack_push(before, capacity, n),
                groups=(1, 1, 1),
                op=node.op,
                label=node.name,
                reason=f"{wg} threads: {choice.source}",
                nbytes=4 * text.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "words are copied")

    def cases(self) -> Iterator[Case]:
        for seed, kind in enumerate(KINDS, 1):
            yield self.build_case(8, 300, 64, kind, seed=seed)
        yield self.build_case(16, 4000, 1000, "copy")
        yield self.build_case(1, 40, 0, "copy")
        yield self.build_case(4, 1, 0, "none")

    def full_cases(self) -> Iterator[Case]:
        for n, length, kind in product((2, 5, 16, 32), (40, 333, 20000), KINDS):
            yield self.build_case(n, length, 2048, kind, seed=n)

    def perf_cases(self) -> Iterator[Case]:
        for length in (1000, 4000, 32000, 130000):
            yield self.build_case(8, length, 8192, "copy")

    def build_case(self, n: int, length: int, before: int, kind: str = "copy", ring: int = 20, seed: int = 1) -> Case:
        """length: tokens of the text, of which the loop has made some that stand in its ring alone. kind: of KINDS."""
        if kind not in KINDS or min(n, length) < 1 or before < 0 or ring < 1:
            raise CaseLineError(
                f"LOOKUP: n={n}, length={length}, before={before}, kind={kind}: expected 1 and more, a kind of {', '.join(KINDS)}"
            )

        def make(rng: np.random.Generator) -> Problem:
            n_ctx = length + 40
            text = np.full(before + n_ctx, -1, np.int32)
            own = rng.integers(0, 50, length) if kind != "none" else rng.permutation(length)
            if kind in ("copy", "long") and length > 20:
                size = min(length // 3, 45 if kind == "long" else 9)
                own[length - size :] = own[3 : 3 + size] = rng.integers(100, 200, size)
            elif kind == "repeat":
                own[-9:] = own[-12:-9].tolist() * 3 if length > 12 else 1
            if kind in ("known", "known_end", "model"):
                text[:before] = rng.integers(0, 50, before)
                if kind == "known_end" and length + 2 < before:
                    text[length + 1] = -1
            elif before:
                text[:before] = rng.integers(0, 50, before)
                text[before // 2] = text[before - 1] = -1
                if kind in ("earlier", "separator") and before > 40:
                    size = min(6, length)
                    own[-size:] = np.arange(300, 300 + size)
                    end = before - 3 if kind == "separator" else before // 2 + 18
                    text[end - size : end] = own[-size:]
            made = min(7, length - 1)
            text[before : before + length - made] = own[: length - made]
            loop = np.zeros(LOOP_RING + ring, np.int32)
            step = 33
            loop[0] = step
            for i in range(made):
                loop[LOOP_RING + (step - made + i) % ring] = own[length - made + i]
            draft = np.zeros(DRAFT_WORDS, np.int32)
            draft[[FIRST, MADE, MOST, MATCH]] = min(before, 5), step - made, MAX_COLUMNS, 1
            if kind in ("known", "known_end", "model"):
                draft[MODE] = MODEL if kind == "model" else KNOWN
            elif kind == "stopped":
                loop[1] = STATUS_EOS
            elif kind == "limit":
                loop[LOOP_LIMIT] = step + 3
            elif kind == "least":
                draft[LEAST] = n
            tokens = np.full(n, 7, np.int32)
            tokens[0] = own[-1]
            pos = np.full(n, 5, np.int32)
            pos[0] = length - 1
            values: dict[str, Array] = {"text": text, "draft": draft, "loop": loop, "tokens": tokens, "pos": pos}
            tensors = {k: Tensor(k, "I32", v.shape, "input") for k, v in values.items()}
            outputs = tuple(tensors[k] for k in ("text", "draft", "tokens", "pos"))
            return Problem(Node(self.name, tuple(tensors.values()), outputs, {"before": before, "capacity": ring}), values)

        shown = {"n": n, "length": length, "before": before, "kind": kind, "ring": ring, "seed": seed}
        return Case(self.name, shown, make, seed)

"""LOOKUP_COLUMNS (shaders/sample/lookup_columns.comp): LOOKUP for n columns of different sequences.

    texts I32 [n_slots, length], draft I32 [n_slots, 96], loops I32 [n_slots, 32 + capacity], tokens, pos, rows, slots, draws I32 [n],
    pages I32 [n_slots, max_pages] -> texts, draft, tokens, pos, rows in place
    params: capacity; page (rows of a page)

It begins a step that SAMPLE_DRAFTS_COLUMNS ends. Column t is of slot slots[t]: its last token (draws 1) at pos[t], or its draft i
(draws 1 + i). For each last token whose loop runs, and whose words of `draft` allow a draft, the columns of its drafts are filled as LOOKUP
fills its own: tokens[t] at pos[t] = its position + i, rows[t] the row of that position, pages[slot, pos / page] * page + pos % page; -1
and -1 where there is no draft, or no page. All other columns stay as they are.

Row s of `texts` has the token of position q of that sequence at q, and tokens that its loop made since the last run are brought there from
its ring. With MODE 1 it has the draft of position q instead, -1 for none. Words of `draft` are LOOKUP's, but for FIRST; MODE is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.sampling.lookup import DRAFT_WORDS, KNOWN, LEAST, LOOP_LIMIT, MADE, MATCH, MAX_WORDS, MODE, MOST, drafts_of, match_of
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_RUNNING
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

MAX_BATCH_COLUMNS = 64

KINDS = ("copy", "none", "repeat", "known", "stopped", "limit", "least", "match", "no_page", "off", "hole", "no_slot", "end")
"""What a case's sequence is like: its end stands earlier in it; no token comes twice; it repeats its last tokens; drafts are given by
position; the loop has stopped; the limit is near; there are fewer drafts than LEAST; matches must be longer than there are; the next page
is missing; it has no drafts; its column is a hole; its slot is none; the text has no room for further tokens."""


def shuffled_columns(rng: np.random.Generator, n: int, count: Callable[[int], int]) -> tuple[int, Array, Array]:
    """n columns of a case, in any order: how many sequences they are of, and `slots` and `draws` I32 [n]. count: columns of the sequence of
    a slot, its last token's and its drafts', the last one's as far as there is room."""
    roles: list[tuple[int, int]] = []
    sequences = 0
    while len(roles) < n:
        roles += [(sequences, 1 + i) for i in range(count(sequences))][: n - len(roles)]
        sequences += 1
    slots, draws = np.array([roles[i] for i in rng.permutation(n)], np.int32).T.copy()
    return sequences, slots, draws


@register
class LookupColumns(Op):
    """See the module's text."""

    name = "LOOKUP_COLUMNS"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        texts, draft, loops, tokens, pos, rows, slots, draws, pages = (np.array(i) for i in inputs)
        at_first = pos.copy()
        for t in range(len(tokens)):
            if draws[t] == 1 and at_first[t] >= 0 and 0 <= slots[t] < len(loops):
                self._fill(int(slots[t]), int(at_first[t]), texts, draft, loops, tokens, pos, rows, slots, draws, pages, params)
        return [texts, draft, tokens, pos, rows]

    def _fill(
        self,
        slot: int,
        at: int,
        texts: Array,
        drafts: Array,
        loops: Array,
        tokens: Array,
        pos: Array,
        rows: Array,
        slots: Array,
        draws: Array,
        pages: Array,
        params: Mapping[str, Any],
    ) -> None:
        text, draft, loop, page = texts[slot], drafts[slot], loops[slot], params["page"]
        step, room = int(loop[0]), min(int(draft[MOST]), len(text) - 1 - at)
        if loop[1] != STATUS_RUNNING or room <= 0:
            return
        known = draft[MODE] == KNOWN
        if not known:
            for s in range(int(draft[MADE]), step):
                text[at - step + 1 + s] = loop[LOOP_RING + s % params["capacity"]]
        draft[MADE] = step
        if loop[LOOP_LIMIT] > 0:
            room = min(room, int(loop[LOOP_LIMIT]) - step - 1)

        def row_of(place: int) -> int:
            index, inside = divmod(at + place, page)
            found = int(pages[slot, index]) if index < pages.shape[1] else -1
            return found * page + inside if found >= 0 else -1

        most = max(room, 0)
        if known:
            shown = text[at + 1 : at + 1 + most].tolist()
        else:
            place, length = match_of(text[: at + 1], 0, 0, int(draft[MATCH]))
            shown = drafts_of(text[: at + 1], 0, 0, int(draft[MATCH]), most) if length else []
        shown = [(token if row_of(i) >= 0 else -1) for i, token in enumerate(shown, 1)] + [-1] * MAX_BATCH_COLUMNS
        columns = [t for t in range(len(tokens)) if slots[t] == slot and draws[t] > 1]
        count = min([most, *(int(draws[t]) - 2 for t in columns if shown[draws[t] - 2] < 0)])
        if count < draft[LEAST]:
            count = 0
        for t in columns:
            place = int(draws[t]) - 1
            tokens[t] = max(shown[place - 1], 0)
            pos[t], rows[t] = (at + place, row_of(place)) if place <= count else (-1, -1)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        texts, draft, loops, tokens, pos, rows, slots, draws, pages = node.inputs
        capacity, page, n, n_slots = node.params["capacity"], node.params["page"], tokens.elements, loops.shape[0]
        if (
            loops.shape[1:] != (LOOP_RING + capacity,)
            or draft.shape != (n_slots, DRAFT_WORDS)
            or {len(texts.shape), len(pages.shape)} != {2}
        ):
            raise PlanError(
                f"[LOOKUP_COLUMNS] {node.name}: {loops}, {draft}, {texts}, {pages}; expected for each of {n_slots} slots "
                f"{LOOP_RING + capacity} words of a loop with a ring of {capacity}, {DRAFT_WORDS} of draft, a text and a row of pages"
            )
        if {texts.shape[0], pages.shape[0]} != {n_slots} or texts.shape[1] > MAX_WORDS or page < 1:
            raise PlanError(
                f"[LOOKUP_COLUMNS] {node.name}: {texts}, {pages}, pages of {page} rows; expected a text of at most {MAX_WORDS} words and "
                f"a row of pages for each of {n_slots} slots, and at least one row in a page"
            )
        if {t.shape for t in (pos, rows, slots, draws)} != {(n,)} or not 1 <= n <= MAX_BATCH_COLUMNS:
            raise PlanError(f"[LOOKUP_COLUMNS] {node.name}: {tokens}, {pos}, {rows}; expected as many of all, at most {MAX_BATCH_COLUMNS}")
        choice = ctx.tuning.pick("lookup", n_ctx=texts.shape[1])
        wg = workgroup_size(ctx.caps, choice["wg_size"], texts.shape[1])
        state = [Arg(t, "rw") for t in (texts, draft)] + [Arg(loops), Arg(tokens, "w"), Arg(pos, "rw"), Arg(rows, "w")]
        return [
            Dispatch(
                kernel=Variant("sample/lookup_columns.comp", (("WG_SIZE", wg),)),
                args=(*state, Arg(slots), Arg(draws), Arg(pages)),
                push=pack_push(texts.shape[1], capacity, n, n_slots, page, pages.shape[1]),
                groups=(n, 1, 1),
                op=node.op,
                label=node.name,
                reason=f"{wg} threads a column: {choice.source}",
                nbytes=4 * min(n, n_slots) * texts.shape[1],
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "words are copied")

    def cases(self) -> Iterator[Case]:
        yield self.build_case(16, 300, seed=1)
        yield self.build_case(64, 300, seed=2)
        yield self.build_case(8, 4000, "copy", seed=3)
        yield from (self.build_case(5, 60, kind, seed=seed) for seed, kind in enumerate(KINDS, 4))
        yield self.build_case(1, 9, "none", seed=5)

    def full_cases(self) -> Iterator[Case]:
        for n, length, seed in product((3, 16, 64), (40, 333, 20000), (1, 2, 3)):
            yield self.build_case(n, length, page=(7, 16, 64)[seed - 1], seed=seed)

    def perf_cases(self) -> Iterator[Case]:
        for length in (1000, 4000, 32000):
            yield self.build_case(16, length, "copy", page=64)

    def build_case(self, n: int, length: int, kind: str = "mixed", page: int = 16, ring: int = 20, seed: int = 1) -> Case:
        """length: tokens of the texts, of which loops have made some that stand in their rings alone. kind: of KINDS; mixed: one sequence
        after the other is of the next kind. Each has a last token and one to five drafts, in any columns."""
        if kind not in (*KINDS, "mixed") or min(n, page, ring) < 1 or length < 9 or n > MAX_BATCH_COLUMNS:
            raise CaseLineError(
                f"LOOKUP_COLUMNS: n={n}, length={length}, kind={kind}: expected 1 to {MAX_BATCH_COLUMNS} columns, 9 tokens and more, a "
                f"kind of mixed, {', '.join(KINDS)}"
            )

        def make(rng: np.random.Generator) -> Problem:
            sequences, slots, draws = shuffled_columns(rng, n, lambda slot: int(rng.integers(2, 7)))
            n_slots, n_ctx = sequences + 1, length + 12
            max_pages = -(-n_ctx // page)
            values: dict[str, Array] = {
                "texts": np.full((n_slots, n_ctx), -1, np.int32),
                "draft": np.zeros((n_slots, DRAFT_WORDS), np.int32),
                "loops": np.zeros((n_slots, LOOP_RING + ring), np.int32),
                "tokens": np.full(n, 7, np.int32),
                "pos": np.full(n, -1, np.int32),
                "rows": np.full(n, -1, np.int32),
                "slots": slots,
                "draws": draws,
                "pages": rng.permutation(n_slots * max_pages).reshape(n_slots, max_pages).astype(np.int32),
            }
            for s in range(sequences):
                self._make_slot(rng, values, s, KINDS[s % len(KINDS)] if kind == "mixed" else kind, length, page, ring)
            tensors = {k: Tensor(k, "I32", v.shape, "input") for k, v in values.items()}
            outputs = tuple(tensors[k] for k in ("texts", "draft", "tokens", "pos", "rows"))
            return Problem(Node(self.name, tuple(tensors.values()), outputs, {"capacity": ring, "page": page}), values)

        return Case(self.name, {"n": n, "length": length, "kind": kind, "page": page, "ring": ring, "seed": seed}, make, seed)

    def _make_slot(self, rng: np.random.Generator, values: dict[str, Array], s: int, kind: str, length: int, page: int, ring: int) -> None:
        own = rng.permutation(length) if kind == "none" else rng.integers(0, 50, length)
        if kind in ("copy", "limit", "least", "no_page", "match"):
            size = min(length // 3, 9)
            own[length - size :] = own[1 : 1 + size] = rng.integers(100, 200, size)
        elif kind == "repeat":
            own[-9:] = own[-3:].tolist() * 3
        text, draft, loop = values["texts"][s], values["draft"][s], values["loops"][s]
        made, step = min(7, length - 1), 33
        text[: length - made] = own[: length - made]
        loop[0] = step
        for i in range(made):
            loop[LOOP_RING + (step - made + i) % ring] = own[length - made + i]
        draft[[MADE, MOST, MATCH]] = step - made, 0 if kind == "off" else int(rng.integers(1, 7)), length if kind == "match" else 1
        if kind == "known":
            draft[MODE] = KNOWN
            text[:] = rng.integers(0, 50, len(text))
            text[length + 3] = -1
        elif kind == "stopped":
            loop[1] = STATUS_EOS
        elif kind == "limit":
            loop[LOOP_LIMIT] = step + 3
        elif kind == "least":
            draft[[MOST, LEAST]] = 6, 6
        elif kind == "no_page":
            values["pages"][s, (length + 1) // page :] = -1
        at = length - 1
        if kind == "end":
            at = len(text) - 1
            draft[MADE] = step
        column = int(np.flatnonzero((values["slots"] == s) & (values["draws"] == 1))[0])
        values["tokens"][column], values["pos"][column], values["rows"][column] = own[-1], -1 if kind == "hole" else at, 5
        if kind == "no_slot":
            values["slots"][column] = int(rng.choice([-1, len(values["loops"]), 2**31 - 1]))

"""SAMPLE_COLUMNS: SAMPLE for n columns of different sequences (shaders/sample with COLUMNS).

    logits F32 [n, vocab], loops I32 [n_slots, 32 + capacity], tokens, pos, rows, slots, draws I32 [n], pages I32 [n_slots, max_pages]
    (, chains F32 [n_slots, 32]) -> loops, tokens, pos, rows (, chains) in place
    params: capacity; page (rows of a page); greedy (every column's temp is known to be 0 or less: one dispatch)

A column t is one token of a step: tokens[t] at position pos[t] of the sequence in slot slots[t]; its K and V lie in row rows[t] of caches.

    pos[t] < 0        a hole: nothing happens
    draws[t] = 0      the column's logits pick nothing: it becomes a hole, pos[t] = rows[t] = -1
    status not 0      of loops[slots[t]]: it becomes a hole, too, as where the slot is none
    else              row t of the logits picks a token as SAMPLE picks it, with the same bits

The token goes into tokens[t] and into the sequence's ring, pos[t] grows by 1, and rows[t] becomes the row of the new position,
pages[slot, pos / page] * page + pos % page. Where that makes the sequence's status another than 0, the column becomes a hole.

loops[s] has the words of SAMPLE's `loop`, and in word 2 the most tokens to make (0: no limit). Status, the first that holds: 1 NaN among
the logits (no token is made), 2 the token ends the text, 3 as many tokens are made as the limit allows, 4 the sequence has no page for its
next row. At most one column that draws may be of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node
from vkback.ops.case import Array, Case, Problem, Tolerance, inputs_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.sampling.chain import CHAIN_WORDS, EXAMPLES, Chain, pick_chain
from vkback.ops.sampling.sample import (
    LOOP_EOS,
    LOOP_PARAMS,
    LOOP_RING,
    STATUS_EOS,
    STATUS_NAN,
    STATUS_RUNNING,
    TRIES,
    Params,
    pick,
    pick_dispatches,
    step_of,
    tolerance_of,
)

LOOP_LIMIT = 2
"""Word of a loop: most tokens to make; 0: no limit."""

STATUS_LENGTH, STATUS_NO_PAGE = 3, 4

KINDS = (
    "runs",
    "hole",
    "masked",
    "eos",
    "limit",
    "new_page",
    "idle",
    "no_page",
    "nan",
    "stopped",
    "eos_at_limit",
    "below_limit",
    "no_slot",
    "beyond",
    "infinite",
    "eos_without_page",
)
"""What a case's column is like: it goes on; it draws from ten tokens; the token ends the text, or is the last that the limit allows, or
both, or the last but one; the next row begins a page that is there, is missing, or lies behind the last; it does not draw; NaN or inf
among its logits; its sequence has stopped; its slot is none; the token ends the text and there is no page."""


@register
class SampleColumns(Op):
    """See the module's text."""

    name = "SAMPLE_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, loops, tokens, pos, rows, slots, draws, pages, *chains = (np.array(i) for i in inputs)
        for t in range(len(tokens)):
            if pos[t] < 0:
                continue
            if draws[t] and 0 <= slots[t] < len(loops) and loops[slots[t], 1] == STATUS_RUNNING:
                loop = loops[slots[t]]
                step_of(loop, logits[t], t, tokens, pos, params["capacity"], chains[0][slots[t]] if chains else None)
                index, place = divmod(int(pos[t]), params["page"])
                page = int(pages[slots[t], index]) if index < pages.shape[1] else -1
                if loop[1] == STATUS_RUNNING and 0 < loop[LOOP_LIMIT] <= loop[0]:
                    loop[1] = STATUS_LENGTH
                elif loop[1] == STATUS_RUNNING and page < 0:
                    loop[1] = STATUS_NO_PAGE
                if loop[1] == STATUS_RUNNING:
                    rows[t] = page * params["page"] + place
                    continue
            pos[t] = rows[t] = -1
        return [loops, tokens, pos, rows, *chains]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, loops, tokens, pos, rows, slots, draws, pages, *chains = node.inputs
        capacity, page = node.params["capacity"], node.params["page"]
        n, n_slots = logits.shape[0], loops.shape[0]
        if wrong := [t for t in (tokens, pos, rows, slots, draws) if t.shape != (n,)]:
            raise PlanError(f"[SAMPLE_COLUMNS] {node.name}: {wrong[0]} beside logits {logits}; expected a value for each of {n} columns")
        if loops.shape[1:] != (LOOP_RING + capacity,) or pages.shape[:1] != (n_slots,) or len(pages.shape) != 2 or page < 1:
            raise PlanError(
                f"[SAMPLE_COLUMNS] {node.name}: {loops}, {pages}, pages of {page} rows; expected {LOOP_RING + capacity} words for a ring "
                f"of {capacity}, a row of pages for each of {n_slots} slots, and at least one row in a page"
            )
        state = [Arg(t, "rw") for t in (loops, tokens, pos, rows)] + [Arg(t) for t in (slots, draws, pages)]
        sizes = (capacity, n_slots, page, pages.shape[1])
        greedy, chain = node.params.get("greedy", False), [Arg(c, "rw") for c in chains]
        return pick_dispatches(node, ctx, logits, state, sizes, greedy, columns="COLUMNS", chain=chain)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return tolerance_of(len(node.inputs) > 8)

    def cases(self) -> Iterator[Case]:
        for seed, (vocab, n, greedy, kind) in enumerate(
            (
                (1000, 1, True, "runs"),
                (1000, 2, True, "eos"),
                (1000, 16, True, "mixed"),
                (5003, 64, True, "mixed"),
                (151936, 5, True, "runs"),
                (1000, 1, False, "runs"),
                (1000, 2, False, "no_page"),
                (1000, 5, False, "runs"),
                (1000, 16, False, "mixed"),
                (3001, 64, False, "mixed"),
                (151936, 2, False, "runs"),
            ),
            1,
        ):
            yield self.build_case(vocab, n, greedy, kind, seed=seed)
        yield self.build_case(1000, 16, kind="mixed", chains=True, seed=12)
        yield self.build_case(3001, 14, kind="runs", chains=True, seed=13)

    def full_cases(self) -> Iterator[Case]:
        for n, greedy, vocab in product((1, 2, 5, 16, 33, 64, 100), (True, False), (1, 77, 1000, 32000)):
            yield self.build_case(vocab, n, greedy, "mixed", page=(1, 16, 64)[n % 3])
        for greedy, kind in product((True, False), KINDS):
            yield self.build_case(1000, 3, greedy, kind)
        yield self.build_case(151936, 16, False, "mixed")
        yield self.build_case(151936, 64, True, "mixed")
        for n, vocab in product((1, 16, 64), (77, 1000, 5003)):
            yield self.build_case(vocab, n, kind="mixed", chains=True)

    def perf_cases(self) -> Iterator[Case]:
        """Of sequences that do not end, however often they run."""
        for greedy, n in product((True, False), (64, 8, 1)):
            yield self.build_case(151936, n, greedy, "runs", page=64, max_pages=16384)

    def build_case(
        self,
        vocab: int,
        n: int,
        greedy: bool = False,
        kind: str = "mixed",
        page: int = 16,
        max_pages: int = 8,
        chains: bool = False,
        seed: int = 1,
    ) -> Case:
        """kind: of KINDS; mixed: one column after the other is of the next kind. Columns that sample have parameters of their own. chains:
        and chains, one after the other of the examples in chain.py; every third has none."""
        if kind not in (*KINDS, "mixed"):
            raise CaseLineError(f"SAMPLE_COLUMNS: kind={kind}: expected mixed or one of {', '.join(KINDS)}")
        if min(vocab, n, page, max_pages - 1) < 1:
            raise CaseLineError(f"SAMPLE_COLUMNS: vocab={vocab}, n={n}, page={page}, max_pages={max_pages}: expected 1 and more, 2 pages")
        capacity = 5

        def make(rng: np.random.Generator) -> Problem:
            n_slots = n + 3
            values: dict[str, Array] = {
                "result_output": np.zeros((n, vocab), np.float32),
                "loops": np.zeros((n_slots, LOOP_RING + capacity), np.int32),
                "tokens": rng.integers(0, vocab, n).astype(np.int32),
                "pos": rng.integers(0, page * (max_pages - 1), n).astype(np.int32),
                "rows": rng.integers(0, 1000, n).astype(np.int32),
                "slots": rng.permutation(n_slots)[:n].astype(np.int32),
                "draws": np.ones(n, np.int32),
                "pages": rng.permutation(n_slots * max_pages).reshape(n_slots, max_pages).astype(np.int32),
            }
            values["loops"][:, LOOP_RING:] = -1
            if chains:
                values["chains"] = np.zeros((n_slots, CHAIN_WORDS), np.float32)
                for t, slot in enumerate(values["slots"]):
                    values["chains"][slot] = (EXAMPLES[t % len(EXAMPLES)] if t % 3 else Chain()).words()
            for t in range(n):
                self._make_column(rng, values, t, KINDS[t % len(KINDS)] if kind == "mixed" else kind, greedy, page)
            tensors = inputs_of(values)
            changed = (*tensors[1:5], *tensors[8:])
            return Problem(Node(self.name, tensors, changed, {"capacity": capacity, "page": page, "greedy": greedy}), values)

        shown = {"vocab": vocab, "n": n, "greedy": greedy, "kind": kind, "page": page, "max_pages": max_pages}
        shown |= {"chains": chains, "seed": seed}
        return Case(self.name, shown, make, seed)

    def _make_column(self, rng: np.random.Generator, values: dict[str, Array], t: int, kind: str, greedy: bool, page: int) -> None:
        slot, pages = int(values["slots"][t]), values["pages"]
        if kind in ("new_page", "no_page", "eos_without_page"):
            values["pos"][t] = page * int(rng.integers(1, pages.shape[1])) - 1
        elif kind == "beyond":
            values["pos"][t] = page * pages.shape[1] - 1
        if kind in ("no_page", "eos_without_page"):
            pages[slot, (values["pos"][t] + 1) // page] = -1
        logits = values["result_output"]
        for _ in range(TRIES):
            sampler = Params(
                0.0 if greedy else float(rng.choice([0.0, 0.7, 1.0, 1.5])),
                int(rng.choice([0, 1, 40, 1000])),
                float(rng.choice([0.5, 0.95, 1.0])),
                float(rng.choice([0.0, 0.05])),
                int(rng.integers(2**32)),
                (),
            )
            logits[t] = 3 * rng.standard_normal(logits.shape[1], np.float32)
            if kind == "masked":
                logits[t, rng.permutation(logits.shape[1])[10:]] = -np.inf
            elif kind in ("nan", "infinite"):
                logits[t, -1] = np.nan if kind == "nan" else np.inf
            chain = Chain.read(values["chains"][slot]) if "chains" in values else Chain()
            if chain.order:
                top_k, top_p, min_p = max(sampler.top_k, 1), min(sampler.top_p, 0.9), max(sampler.min_p, 0.01)
                sampler = replace(sampler, temp=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
            pos = int(values["pos"][t])
            picked = pick_chain(logits[t], sampler, chain, pos)[0] if chain.order else pick(logits[t], sampler, pos)
            if picked.sure:
                break
        else:
            raise CaseLineError(f"SAMPLE_COLUMNS: in {TRIES} tries no choice that rounding cannot change; expected other parameters")
        loop = values["loops"][slot]
        loop[:LOOP_RING] = sampler.words(0)
        loop[0] = int(rng.integers(0, 20))
        if kind in ("eos", "eos_at_limit", "eos_without_page"):
            loop[LOOP_PARAMS + 5] = 2
            loop[LOOP_EOS : LOOP_EOS + 2] = (logits.shape[1], picked.token)
        if kind in ("limit", "eos_at_limit", "below_limit"):
            loop[LOOP_LIMIT] = loop[0] + (2 if kind == "below_limit" else 1)
        elif kind == "stopped":
            loop[1] = int(rng.choice([STATUS_NAN, STATUS_EOS, STATUS_LENGTH, STATUS_NO_PAGE]))
        elif kind == "idle":
            values["draws"][t] = 0
        elif kind == "no_slot":
            values["slots"][t] = int(rng.choice([-1, len(values["loops"]), 2**31 - 1]))
        elif kind == "hole":
            values["pos"][t] = values["rows"][t] = -1

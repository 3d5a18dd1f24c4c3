"""SAMPLE_DRAFTS_COLUMNS: SAMPLE_COLUMNS for sequences of which some have drafts (shaders/sample with COLUMNS and PICKS,
accept_columns.comp).

    logits F32 [n, vocab], loops I32 [n_slots, 32 + capacity], tokens, pos, rows, slots, draws I32 [n], pages I32 [n_slots, max_pages],
    draft I32 [n_slots, 96] (, seen I32 [n_slots, 4 + vocab + max_rows]) (, chains F32 [n_slots, 32])
    -> loops, tokens, pos, rows, draft (, seen) (, chains) in place
    params: capacity; page (rows of a page); greedy (every column's temp is known to be 0 or less); penalized (there is `seen`)

Column t is of slot slots[t]: draws 0: it picks nothing; 1: the last token of the sequence; 1 + i: its draft i, in any column. The columns
of a sequence pick tokens as SAMPLE_DRAFTS says, by the parameters in its own loop: what the last token's column picks is the next token;
if that is draft 1, what the column of draft 1 picks is the one after it, and so on. Each token goes into the sequence's ring. The column of
the last token then stands for the latest one, as SAMPLE_COLUMNS leaves it, and all columns of drafts are holes, pos = rows = -1.

Status, after the first token of which one holds: 1 NaN among its logits (it is not made), 2 it ends the text, 3 the limit is reached, 4
the sequence has no page for its next row. Words of `draft` count the steps of a sequence that had drafts. A sequence whose chain has
mirostat, which moves on with each token, has none. With `seen`, PENALTIES_DRAFTS_COLUMNS comes before, and the tokens of the columns whose
picks were taken are counted in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance, inputs_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.topk import argmax_dispatch
from vkback.ops.op import Op, register
from vkback.ops.sampling.chain import CHAIN_WORDS, EXAMPLES, Chain, pick_chain
from vkback.ops.sampling.columns import LOOP_LIMIT, STATUS_LENGTH, STATUS_NO_PAGE
from vkback.ops.sampling.drafts import count_drafts, count_in, end_by, sure_pick
from vkback.ops.sampling.lookup import DRAFT_WORDS
from vkback.ops.sampling.lookup_columns import MAX_BATCH_COLUMNS, shuffled_columns
from vkback.ops.sampling.penalties import SEEN_COUNTS, Penalties
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_NAN, STATUS_RUNNING, Params, pick, pick_dispatches, tolerance_of
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

KINDS = (
    "all",
    "none",
    "some",
    "no_drafts",
    "eos",
    "eos_later",
    "limit",
    "nan",
    "nan_later",
    "stopped",
    "hole",
    "idle",
    "no_page",
    "no_slot",
)
"""What a case's sequence is like: all drafts right; the first is wrong; the second is; there are none; the first token picked ends the
text, or the second; the limit is reached within the drafts; NaN in the first column, or in the second; the loop has stopped; its
column is a hole; it does not draw; the next page is missing; its slot is none."""

MIROSTATS = tuple(chain for chain in EXAMPLES if chain.moves)
CHAINS = (EXAMPLES[0], EXAMPLES[6])
"""Of a case's sequences."""


@register
class SampleDraftsColumns(Op):
    """See the module's text."""

    name = "SAMPLE_DRAFTS_COLUMNS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, loops, tokens, pos, rows, slots, draws, pages, draft, *others = (np.array(i) for i in inputs)
        seen, chains = (others[:1], others[1:]) if params.get("penalized") else ([], others)
        text, at = tokens.copy(), pos.copy()
        running = {s for s in range(len(loops)) if loops[s, 1] == STATUS_RUNNING}
        for t in range(len(tokens)):
            if at[t] < 0:
                continue
            pos[t] = rows[t] = -1
            if draws[t] != 1 or slots[t] not in running:
                continue
            slot = int(slots[t])
            columns = {int(draws[c]) - 1: c for c in range(len(tokens)) if slots[c] == slot and draws[c] >= 1 and at[c] >= 0}
            drafted = next(i for i in range(1, len(tokens) + 1) if i not in columns) - 1
            made, row = self._take(slot, columns, logits, loops[slot], tokens, text, at, pages, params, chains)
            if loops[slot, 1] == STATUS_RUNNING:
                pos[t], rows[t] = at[t] + made, row
            for counted in seen:
                for i in range(made):
                    count_in(counted[slot], logits.shape[1], int(text[columns[i]]), int(at[t]) + i)
            if drafted:
                count_drafts(draft[slot], drafted, max(made - 1, 0))
        return [loops, tokens, pos, rows, draft, *others]

    def _take(
        self,
        slot: int,
        columns: Mapping[int, int],
        logits: Array,
        loop: Array,
        tokens: Array,
        text: Array,
        at: Array,
        pages: Array,
        params: Mapping[str, Any],
        chains: Sequence[Array],
    ) -> tuple[int, int]:
        """Tokens that a sequence makes, and the row of its next one."""
        sampler, first, made, row = Params.read(loop), columns[0], 0, -1
        while True:
            c = columns[made]
            if chains and chains[0][slot][0]:
                found, after = pick_chain(logits[c], sampler, Chain.read(chains[0][slot]), int(at[c]))
                token = found.token
                chains[0][slot][:] = after.words()
            else:
                token = pick(logits[c], sampler, int(at[c])).token
            if token < 0:
                loop[1] = STATUS_NAN
                return made, row
            loop[LOOP_RING + loop[0] % params["capacity"]] = token
            loop[0] += 1
            made += 1
            tokens[first] = token
            index, inside = divmod(int(at[first]) + made, params["page"])
            page = int(pages[slot, index]) if index < pages.shape[1] else -1
            row = page * params["page"] + inside
            if token in sampler.eos:
                loop[1] = STATUS_EOS
            elif 0 < loop[LOOP_LIMIT] <= loop[0]:
                loop[1] = STATUS_LENGTH
            elif page < 0:
                loop[1] = STATUS_NO_PAGE
            if loop[1] != STATUS_RUNNING or made not in columns or text[columns[made]] != token:
                return made, row

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, loops, tokens, pos, rows, slots, draws, pages, draft, *others = node.inputs
        seen, chains = (others[:1], others[1:]) if node.params.get("penalized") else ([], others)
        capacity, page, n, n_slots = node.params["capacity"], node.params["page"], logits.shape[0], loops.shape[0]
        if {t.shape for t in (tokens, pos, rows, slots, draws)} != {(n,)} or n > MAX_BATCH_COLUMNS:
            raise PlanError(
                f"[SAMPLE_DRAFTS_COLUMNS] {node.name}: {tokens}, {pos}, {rows} beside logits {logits}; expected a value for each of at "
                f"most {MAX_BATCH_COLUMNS} columns"
            )
        if loops.shape[1:] != (LOOP_RING + capacity,) or draft.shape != (n_slots, DRAFT_WORDS) or pages.shape[0] != n_slots or page < 1:
            raise PlanError(
                f"[SAMPLE_DRAFTS_COLUMNS] {node.name}: {loops}, {draft}, {pages}, pages of {page} rows; expected for each of {n_slots} "
                f"slots {LOOP_RING + capacity} words for a ring of {capacity}, {DRAFT_WORDS} of draft and a row of pages, and at least one "
                "row in a page"
            )
        max_rows = seen[0].shape[-1] - SEEN_COUNTS - logits.shape[1] if seen else 0
        if seen and (seen[0].shape[:-1] != (n_slots,) or max_rows < 1):
            raise PlanError(
                f"[SAMPLE_DRAFTS_COLUMNS] {node.name}: {seen[0]}; expected for each of {n_slots} slots {SEEN_COUNTS} words, "
                f"{logits.shape[1]} counts, and the text"
            )
        picked = Tensor(f"{node.name}.picked", "I32", (n,))
        if node.params.get("greedy", False):
            picks = [argmax_dispatch(node, ctx, logits, [Arg(picked, "w")], {"MODE": 0})]
        else:
            state = [Arg(loops), Arg(picked, "w"), Arg(pos), Arg(slots), Arg(draws)]
            sizes = (capacity, n_slots, page, pages.shape[1])
            chain = [Arg(c, "rw") for c in chains]
            picks = pick_dispatches(node, ctx, logits, state, sizes, False, columns="COLUMNS", chain=chain, noted=True)
        wg = workgroup_size(ctx.caps, MAX_BATCH_COLUMNS, n)
        counting = {"PENALIZED": 1} if seen else {}
        accept = Dispatch(
            kernel=Variant.of("sample/accept_columns.comp", {"WG_SIZE": wg, "MAX_COLUMNS": MAX_BATCH_COLUMNS, **counting}),
            args=(
                Arg(picked),
                *(Arg(t, "rw") for t in (loops, tokens, pos)),
                Arg(rows, "w"),
                *map(Arg, (slots, draws, pages)),
                Arg(draft, "rw"),
                *(Arg(s, "rw") for s in seen),
            ),
            push=pack_push(n, capacity, n_slots, page, pages.shape[1], logits.shape[1], max_rows),
            groups=(1, 1, 1),
            op=node.op,
            label=node.name,
            reason=f"{wg} threads, a column each",
            nbytes=4 * (6 * n + n_slots * DRAFT_WORDS),
        )
        return [*picks, accept]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return tolerance_of(any(t.name == "chains" for t in node.inputs))

    def cases(self) -> Iterator[Case]:
        for seed, (vocab, n, greedy, kind) in enumerate(
            (
                (1000, 64, True, "mixed"),
                (1000, 64, False, "mixed"),
                (151936, 8, True, "some"),
                (5003, 33, False, "mixed"),
                (77, 1, False, "all"),
            ),
            1,
        ):
            yield self.build_case(vocab, n, greedy, kind, seed=seed)
        yield from (self.build_case(1000, 6, seed % 2 == 0, kind, seed=seed) for seed, kind in enumerate(KINDS, 6))
        yield self.build_case(1000, 32, kind="mixed", chains=True, seed=12)
        yield self.build_case(77, 64, True, penalized=True, seed=13)
        yield self.build_case(1000, 32, penalized=True, chains=True, seed=14)

    def full_cases(self) -> Iterator[Case]:
        for vocab, n, greedy, seed in product((31, 5003, 32000), (2, 16, 64), (True, False), (1, 2, 3)):
            yield self.build_case(vocab, n, greedy, chains=seed == 3 and not greedy, penalized=seed == 2, seed=seed)

    def perf_cases(self) -> Iterator[Case]:
        for greedy, n in product((True, False), (64, 16)):
            yield self.build_case(151936, n, greedy, "none", page=64, max_pages=16384)

    def build_case(
        self,
        vocab: int,
        n: int,
        greedy: bool = False,
        kind: str = "mixed",
        page: int = 16,
        max_pages: int = 8,
        chains: bool = False,
        penalized: bool = False,
        seed: int = 1,
    ) -> Case:
        """kind: of KINDS; mixed: one sequence after the other is of the next kind. Each has a last token and none to five drafts, in any
        columns. chains: every second has one, those with mirostat no drafts. penalized: and `seen`, with the window of each its own."""
        if kind not in (*KINDS, "mixed") or min(vocab - 30, n, page, max_pages - 1) < 1 or n > MAX_BATCH_COLUMNS:
            raise CaseLineError(
                f"SAMPLE_DRAFTS_COLUMNS: vocab={vocab}, n={n}, kind={kind}: expected a vocabulary of 31 and more, 1 to {MAX_BATCH_COLUMNS} "
                f"columns, a kind of mixed, {', '.join(KINDS)}"
            )
        capacity = 20

        def make(rng: np.random.Generator) -> Problem:
            sequences, slots, draws = shuffled_columns(rng, n, lambda slot: 1 if chains and slot % 4 == 1 else int(rng.integers(3, 7)))
            n_slots = sequences + 1
            values: dict[str, Array] = {
                "result_output": (3 * rng.standard_normal((n, vocab), np.float32)).astype(np.float32),
                "loops": np.zeros((n_slots, LOOP_RING + capacity), np.int32),
                "tokens": rng.integers(0, vocab, n).astype(np.int32),
                "pos": np.full(n, -1, np.int32),
                "rows": np.full(n, -1, np.int32),
                "slots": slots,
                "draws": draws,
                "pages": rng.permutation(n_slots * max_pages).reshape(n_slots, max_pages).astype(np.int32),
                "draft": rng.integers(0, 9, (n_slots, DRAFT_WORDS)).astype(np.int32),
            }
            values["loops"][:, LOOP_RING:] = -1
            if chains:
                values["chains"] = np.zeros((n_slots, CHAIN_WORDS), np.float32)
                for s in range(1, sequences, 2):
                    values["chains"][s] = (MIROSTATS if s % 4 == 1 else CHAINS)[s // 4 % 2].words()
            for s in range(sequences):
                self._make_slot(rng, values, s, KINDS[s % len(KINDS)] if kind == "mixed" else kind, greedy, page)
            if penalized:
                rows = page * max_pages
                texts = [rng.integers(0, vocab, rows - 10).tolist() for _ in range(n_slots)]
                values["seen"] = np.stack(
                    [Penalties(1.1, 0.0, 0.0, (0, 2, 64)[s % 3]).words(text, vocab, rows) for s, text in enumerate(texts)]
                )
            values |= {name: values.pop(name) for name in ("seen", "chains") if name in values}  # in the order of the inputs
            tensors = inputs_of(values)
            changed = (*tensors[1:5], *tensors[8:])
            params = {"capacity": capacity, "page": page, "greedy": greedy, "penalized": penalized}
            return Problem(Node(self.name, tensors, changed, params), values)

        shown = {"vocab": vocab, "n": n, "greedy": greedy, "kind": kind, "page": page, "max_pages": max_pages}
        return Case(self.name, {**shown, "chains": chains, "penalized": penalized, "seed": seed}, make, seed)

    def _make_slot(self, rng: np.random.Generator, values: dict[str, Array], s: int, kind: str, greedy: bool, page: int) -> None:
        slots, draws, pages, logits = values["slots"], values["draws"], values["pages"], values["result_output"]
        columns = sorted(np.flatnonzero(slots == s).tolist(), key=lambda c: int(draws[c]))
        begin = page + int(rng.integers(0, page)) if kind != "no_page" else page * pages.shape[1] // 2 - 2
        top_k, seed = int(rng.choice([1, 40])), int(rng.integers(2**32))
        sampler = Params(0.0 if greedy else 0.9, top_k, 0.95, 0.05, seed, ())
        chain = Chain.read(values["chains"][s]) if "chains" in values else Chain()
        picks = []
        for i, c in enumerate(columns):
            picks.append(sure_pick(self.name, rng, logits[c], sampler, begin + i, chain))
            values["pos"][c], values["rows"][c] = begin + i, int(rng.integers(1000))
            if i:
                values["tokens"][c] = picks[i - 1]
        if wrong := columns[{"none": 1, "some": 2}.get(kind, len(columns)) :][:1]:
            values["tokens"][wrong[0]] = (values["tokens"][wrong[0]] + 1) % logits.shape[1]
        loop = values["loops"][s]
        loop[:LOOP_RING] = sampler.words(0)
        loop[0] = 17
        end_by(kind, loop, logits, columns, picks)
        if kind == "no_drafts":
            for c in columns[1:]:
                values["pos"][c] = values["rows"][c] = -1
        elif kind == "hole":
            values["pos"][columns[0]] = values["rows"][columns[0]] = -1
        elif kind == "idle":
            draws[columns[0]] = 0
        elif kind == "no_page":
            pages[s, pages.shape[1] // 2 :] = -1
        elif kind == "no_slot":
            slots[columns[0]] = int(rng.choice([-1, len(values["loops"]), 2**31 - 1]))

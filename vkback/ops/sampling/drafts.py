"""SAMPLE_DRAFTS: SAMPLE for n columns of one text, the last n - 1 of which are drafts (shaders/sample with DRAFTS, accept.comp).

    logits F32 [n, vocab], loop I32 [32 + capacity], tokens I32 [n], pos I32 [n], draft I32 [96] (, seen I32 [4 + vocab + n_ctx])
    (, chain F32 [32]) -> loop, tokens, pos, draft (, seen) in place
    params: capacity; greedy (the loop's temp is known to be 0 or less); chained (there is `chain`, without mirostat)

Column c is token tokens[c] at position pos[c], -1: there is none. Its logits pick a token as SAMPLE picks it, with the same bits: the
noise belongs to the position. What column 0 picks is the text's next token. If that is the draft in column 1, what column 1 picks is the
one after it, and so on: the first column whose draft is another token, or is none, ends the step. So the text is the one without drafts,
whatever these are.

Each token goes into the ring; the last one into tokens[0], and pos[0] grows by their number. Words of `loop` are SAMPLE's; word 2 is the
most tokens to make (0: no limit). Status, after the first token of which one holds: 1 NaN among its logits (it is not made), 2 it ends the
text, 3 the limit is reached.

With `seen`, PENALTIES_DRAFTS comes before, and the tokens of the columns whose picks were taken are counted in.
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
from vkback.ops.sampling.chain import EXAMPLES, Chain, pick_chain
from vkback.ops.sampling.lookup import ACCEPTED, ACCEPTED_AT, DRAFT_WORDS, DRAFTED, DRAFTED_AT, LOOP_LIMIT, MAX_COLUMNS, STEPS
from vkback.ops.sampling.penalties import SEEN_COUNTS, Penalties
from vkback.ops.sampling.sample import (
    LOOP_EOS,
    LOOP_PARAMS,
    LOOP_RING,
    STATUS_EOS,
    STATUS_NAN,
    STATUS_RUNNING,
    TRIES,
    Params,
    Pick,
    pick,
    pick_dispatches,
)
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

STATUS_LENGTH = 3


def count_in(seen: Array, vocab: int, token: int, place: int) -> None:
    """What PENALTIES counts of one token of a text, in place."""
    last_n = Penalties.read(seen).last_n
    counts, places = seen[SEEN_COUNTS:][:vocab], seen[SEEN_COUNTS + vocab :]
    counts[token] += 1
    places[place] = token
    if place >= last_n:
        counts[places[place - last_n]] -= 1


def count_drafts(draft: Array, drafted: int, accepted: int) -> None:
    """What DRAFT_WORDS count of one step, in place."""
    for word, by in ((STEPS, 1), (DRAFTED, drafted), (ACCEPTED, accepted)):
        draft[word] += by
    draft[DRAFTED_AT : DRAFTED_AT + drafted] += 1
    draft[ACCEPTED_AT : ACCEPTED_AT + accepted] += 1


def picked_from(row: Array, sampler: Params, chain: Chain, pos: int) -> Pick:
    """The token of a row of logits, by the sampler, or by the chain if it has samplers."""
    return pick_chain(row, sampler, chain, pos)[0] if chain.order else pick(row, sampler, pos)


def sure_pick(op: str, rng: np.random.Generator, row: Array, sampler: Params, pos: int, chain: Chain | None = None) -> int:
    """Fill a row of logits for a case of `op`; the token that it picks, whatever rounding does. Raises CaseLineError."""
    for _ in range(TRIES):
        row[:] = 3 * rng.standard_normal(len(row), np.float32)
        picked = picked_from(row, sampler, chain or Chain(), pos)
        if picked.sure:
            return picked.token
    raise CaseLineError(f"{op}: in {TRIES} tries no choice that rounding cannot change; expected other parameters")


def end_by(kind: str, loop: Array, logits: Array, columns: Sequence[int], picks: Sequence[int]) -> None:
    """Of a case's kind, what ends its text: in place, in the words of its loop and the logits of its columns."""
    second = min(1, len(columns) - 1)
    if kind in ("eos", "eos_later"):
        loop[LOOP_PARAMS + 5] = 2
        loop[LOOP_EOS : LOOP_EOS + 2] = logits.shape[1], picks[second if kind == "eos_later" else 0]
    elif kind == "limit":
        loop[LOOP_LIMIT] = loop[0] + max(len(columns) // 2, 1)
    elif kind in ("nan", "nan_later"):
        logits[columns[second if kind == "nan_later" else 0], -1] = np.nan
    elif kind == "stopped":
        loop[1] = STATUS_EOS


KINDS = ("all", "none", "some", "no_drafts", "eos", "eos_later", "limit", "nan", "nan_later", "stopped")
"""What a case's drafts are like: all right; the first is wrong; one in the middle is; there are none; the first token picked ends the
text, or the second; the limit is reached within the drafts; NaN in the first column, or in the second; the loop has stopped."""

PLAIN_CHAINS = tuple(i for i, chain in enumerate(EXAMPLES, 1) if not chain.moves)
"""Numbers of the examples in chain.py that drafts can have."""


@register
class SampleDrafts(Op):
    """See the module's text."""

    name = "SAMPLE_DRAFTS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, loop, tokens, pos, draft, *others = (np.array(i) for i in inputs)
        chain = Chain.read(others.pop()) if params.get("chained") else Chain()
        if loop[1] != STATUS_RUNNING or pos[0] < 0:
            return [loop, tokens, pos, draft, *others]
        sampler, vocab, at = Params.read(loop), logits.shape[1], pos.copy()
        text, made = tokens.copy(), 0
        last = -1
        for c in range(len(tokens)):
            if c and (at[c] < 0 or text[c] != last):
                break
            last = picked_from(logits[c], sampler, chain, int(at[c])).token
            if last < 0:
                loop[1] = STATUS_NAN
                break
            loop[LOOP_RING + loop[0] % params["capacity"]] = last
            loop[0] += 1
            made += 1
            tokens[0], pos[0] = last, at[0] + made
            if last in sampler.eos:
                loop[1] = STATUS_EOS
            elif 0 < loop[LOOP_LIMIT] <= loop[0]:
                loop[1] = STATUS_LENGTH
            if loop[1] != STATUS_RUNNING:
                break
        count_drafts(draft, int((at[1:] >= 0).sum()), max(made - 1, 0))
        for seen in others:
            for c in range(made):
                count_in(seen, vocab, int(text[c]), int(at[c]))
        return [loop, tokens, pos, draft, *others]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, loop, tokens, pos, draft, *seen = node.inputs
        chain = [Arg(seen.pop(), "rw")] if node.params.get("chained") else []
        capacity, (n, vocab) = node.params["capacity"], logits.shape
        if loop.shape != (LOOP_RING + capacity,) or draft.shape != (DRAFT_WORDS,) or {tokens.shape, pos.shape} != {(n,)} or n > MAX_COLUMNS:
            raise PlanError(
                f"[SAMPLE_DRAFTS] {node.name}: {logits}, {loop}, {tokens}, {pos}, {draft}; expected a token and a position for each of at "
                f"most {MAX_COLUMNS} rows of logits, {LOOP_RING + capacity} words for a ring of {capacity}, {DRAFT_WORDS} of draft"
            )
        n_ctx = seen[0].elements - SEEN_COUNTS - vocab if seen else 0
        picked = Tensor(f"{node.name}.picked", "I32", (n,))
        if node.params.get("greedy", False):
            picks = [argmax_dispatch(node, ctx, logits, [Arg(picked, "w")], {"MODE": 0})]
        else:
            state = [Arg(loop), Arg(picked, "w"), Arg(pos)]
            picks = pick_dispatches(node, ctx, logits, state, (capacity,), False, columns="DRAFTS", chain=chain)
        wg = workgroup_size(ctx.caps, MAX_COLUMNS, n)
        accept = Dispatch(
            kernel=Variant.of("sample/accept.comp", {"WG_SIZE": wg, **({"PENALIZED": 1} if seen else {})}),
            args=(Arg(picked), Arg(loop, "rw"), Arg(tokens, "rw"), Arg(pos, "rw"), Arg(draft, "rw"), *(Arg(s, "rw") for s in seen)),
            push=pack_push(n, capacity, vocab, n_ctx),
            groups=(1, 1, 1),
            op=node.op,
            label=node.name,
            reason=f"{wg} threads, a column each",
            nbytes=4 * (5 * n + DRAFT_WORDS),
        )
        return [*picks, accept]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "a token is right or wrong; cases avoid close calls (see pick)")

    def cases(self) -> Iterator[Case]:
        for seed, (kind, greedy) in enumerate(product(KINDS, (True, False)), 1):
            yield self.build_case(1000, 8, greedy, kind, penalized=seed % 3 == 0, seed=seed)
        yield self.build_case(151936, 16, True, "some")
        yield self.build_case(151936, 4, False, "all")
        yield self.build_case(77, 1, False, "all", penalized=True)
        yield self.build_case(1000, 8, False, "some", penalized=True, chain=1)
        yield self.build_case(1000, 8, False, "all", chain=7)

    def full_cases(self) -> Iterator[Case]:
        for vocab, n, greedy, kind, penalized in product((31, 5003, 32000), (1, 2, 5, 16, 32), (True, False), KINDS, (False, True)):
            yield self.build_case(vocab, n, greedy, kind, penalized=penalized, seed=n)
        # Of 5003 tokens the least likely that top-p keeps has a p below what a choice must be clear by.
        for chain in PLAIN_CHAINS:
            yield self.build_case(1000, 5, False, "some", chain=chain)

    def perf_cases(self) -> Iterator[Case]:
        for greedy, n in product((True, False), (16, 8, 4)):
            yield self.build_case(151936, n, greedy, "none")

    def build_case(
        self, vocab: int, n: int, greedy: bool = False, kind: str = "some", penalized: bool = False, chain: int = 0, seed: int = 1
    ) -> Case:
        """kind: of KINDS. penalized: with `seen`, whose window is shorter than the columns are many or longer, in turn. chain: 0: none;
        else the number of an example in chain.py without mirostat."""
        if kind not in KINDS or min(vocab, n) < 1 or n > MAX_COLUMNS or chain not in (0, *PLAIN_CHAINS) or (chain and greedy):
            raise CaseLineError(
                f"SAMPLE_DRAFTS: vocab={vocab}, n={n}, kind={kind}, chain={chain}: expected 1 and more, a kind of {', '.join(KINDS)}, a "
                f"chain of {', '.join(map(str, PLAIN_CHAINS))}, not greedy, or 0"
            )
        capacity, samplers = 20, EXAMPLES[chain - 1] if chain else Chain()

        def make(rng: np.random.Generator) -> Problem:
            begin, length = 60, 100
            sampler = Params(0.0 if greedy else 1.0 if chain else 0.9, 40, 0.95, 0.05, int(rng.integers(2**32)), ())
            logits = np.zeros((n, vocab), np.float32)
            picks = [sure_pick(self.name, rng, logits[c], sampler, begin + c, samplers) for c in range(n)]
            tokens = np.array([3 % vocab, *picks[:-1]], np.int32)
            wrong = {"none": 1, "some": n // 2}.get(kind, n)
            if 0 < wrong < n:
                tokens[wrong] = (tokens[wrong] + 1) % vocab
            pos = begin + np.arange(n, dtype=np.int32)
            if kind in ("no_drafts", "some"):
                pos[1 if kind == "no_drafts" else max(n - 2, 1) :] = -1
            loop = np.concatenate([sampler.words(0), np.full(capacity, -1, np.int32)])
            loop[0] = 17
            end_by(kind, loop, logits, range(n), picks)
            values: dict[str, Array] = {"result_output": logits, "loop": loop, "tokens": tokens, "pos": pos}
            values["draft"] = rng.integers(0, 9, DRAFT_WORDS).astype(np.int32)
            if penalized:
                used = Penalties(1.1, 0.0, 0.0, int(rng.choice([0, 2, 64])))
                values["seen"] = used.words(rng.integers(0, min(vocab, 20), begin).tolist(), vocab, length)
            if chain:
                values["chain"] = samplers.words()
            tensors = inputs_of(values)
            params = {"capacity": capacity, "greedy": greedy, "chained": chain > 0}
            return Problem(Node(self.name, tensors, tensors[1 : len(tensors) - (chain > 0)], params), values)

        shown = {"vocab": vocab, "n": n, "greedy": greedy, "kind": kind, "penalized": penalized, "chain": chain, "seed": seed}
        return Case(self.name, shown, make, seed)

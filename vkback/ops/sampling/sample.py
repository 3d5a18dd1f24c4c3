"""SAMPLE: picks the next token on the device and moves the generation loop on (shaders/sample).

    logits F32 [1, vocab], loop I32 [32 + capacity], tokens I32 [1], pos I32 [1] (, chain F32 [32]) -> loop, tokens, pos (, chain) in place
    params: capacity; greedy (the loop's temp is known to be 0 or less: one dispatch); ids (greedy alone: a last input I32 [vocab] has the
            id of the token of each logit, else that is its place)

Words of `loop`: 0 step (tokens made), 1 status (0 running, 1 NaN among the logits, 2 an end-of-text token was made), 8..13 temp F32, top_k,
top_p F32, min_p F32, seed, n_eos; 16..31 end-of-text ids; 32.. ring of the ids made, step s at 32 + s % capacity. One run writes the
ring and tokens[0] and adds 1 to pos[0]. Unless status is 0 nothing changes, so tokens of a submit after the last one wanted do no harm.

temp <= 0 takes the largest logit, the first of equals. Else tokens are measured by their distance below the largest logit in steps of 2^-20
(at most 128) and filtered in this order:
    top_k   > 0: the top_k smallest distances, of equal ones the lowest ids
    top_p   < 1: the smallest distances that hold top_p of the sum of exp(-distance) of what is left
    min_p   > 0: distances up to -ln(min_p)
A filter keeps at least the nearest distance, and all but top_k tokens of equal distance together. With a chain, other samplers stand in
their place (vkback/ops/sampling/chain.py). The draw has the odds of a softmax of logits / temp
over what is left: the largest of -distance / temp + noise, where noise is a function of seed, position and token id (Gumbel's trick). So
the token depends on nothing but logits, parameters and position, however many tokens go with a submit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.family import POWERS, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.topk import argmax_dispatch
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

LOOP_PARAMS, LOOP_EOS, LOOP_RING = 8, 16, 32
"""Where parameters, end-of-text ids and ring begin in `loop`."""

STATUS_RUNNING, STATUS_NAN, STATUS_EOS = 0, 1, 2

MAX_VOCAB = 2**18
"""More tokens could overflow the 32-bit sums of a histogram bin (shaders/sample/scale.glsl)."""

BINS, SCRATCH_WORDS = 512, 5
"""Bins of a histogram, and words before them in the scratch (shaders/sample/scale.glsl)."""

STEPS = float(2**20)
FARTHEST = np.float32(127.99999)

declare("sample", match={"vocab": "number"}, params={"wg_size": POWERS, "per_thread": (1, 2, 4, 8, 16, 32, 64)})


@dataclass(frozen=True)
class Params:
    """The sampler's parameters in `loop`."""

    temp: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    eos: tuple[int, ...]

    @classmethod
    def read(cls, loop: Array) -> Params:
        packed = np.asarray(loop[LOOP_PARAMS : LOOP_PARAMS + 6], np.int32).tobytes()
        temp, top_k, top_p, min_p, seed, n_eos = struct.unpack("<fiffIi", packed)
        return cls(temp, top_k, top_p, min_p, seed, tuple(int(i) for i in loop[LOOP_EOS : LOOP_EOS + n_eos]))

    def words(self, capacity: int) -> npt.NDArray[np.int32]:
        """A fresh loop state, int32 [32 + capacity]."""
        loop = np.zeros(LOOP_RING + capacity, np.int32)
        packed = struct.pack("<fiffIi", self.temp, self.top_k, self.top_p, self.min_p, self.seed, len(self.eos))
        loop[LOOP_PARAMS : LOOP_PARAMS + 6] = np.frombuffer(packed, np.int32)
        loop[LOOP_EOS : LOOP_EOS + len(self.eos)] = self.eos
        return loop


def unit(seed: int, pos: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number between 0 and 1 for each token, the twin of shaders/sample/noise.glsl: an odd multiple of 2^-24 from a hash."""
    x, y, z = (np.broadcast_to(np.asarray(v, np.int64), ids.shape).astype(np.uint32) for v in (ids, pos, seed))
    with np.errstate(over="ignore"):
        x, y, z = (v * np.uint32(1664525) + np.uint32(1013904223) for v in (x, y, z))
        for last in (False, True):
            x = x + y * z
            y = y + z * x
            z = z + x * y
            if not last:
                x, y, z = (v ^ (v >> np.uint32(16)) for v in (x, y, z))
    return np.asarray((x >> np.uint32(9)).astype(np.float64) * 2.0**-23 + 2.0**-24)


def noise(seed: int, pos: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise of tokens: -log(-log(1 - u)), u being their `unit`."""
    return np.asarray(-np.log(-np.log1p(-unit(seed, pos, ids))))


@dataclass(frozen=True)
class Pick:
    """The token, -1 for NaN. sure: no decision on the way was so close that f32 rounding may turn it."""

    token: int
    sure: bool


def pick(logits: Array, params: Params, pos: int) -> Pick:
    """The next token in float64, by the rules at the top of this file.

    Close calls, where a device may decide otherwise: the two best scores within 1e-4 (relative to their size where that exceeds 1: f32
    rounds scores of 100 to 8e-6, and the device's logarithm is good to 5e-7); the sum at a candidate end of top_p within 1e-4 of its target
    (each token's exp is rounded to 2^-17); a token within 64 steps of min_p's limit (the device's logarithm).
    """
    x = np.asarray(logits, np.float32)
    if np.isnan(x).any():
        return Pick(-1, True)
    top = x.max()
    if params.temp <= 0 or np.isinf(top):
        return Pick(int(np.argmax(x)), True)
    steps = (np.minimum(top - x, FARTHEST) * np.float32(STEPS)).astype(np.int64)
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    kept_first = params.top_k if 0 < params.top_k < len(x) else len(x)
    sure = True
    if params.top_p < 1:
        left = ordered[:kept_first]
        distances, counts = np.unique(left, return_counts=True)
        sums = np.cumsum(counts * np.exp(-distances / STEPS))
        target = max(params.top_p, 1e-9) * sums[-1]
        limit = int(distances[np.searchsorted(sums, target)])
        kept_first = min(kept_first, int(np.searchsorted(ordered, limit, "right")))
        sure &= bool(np.abs(sums / sums[-1] - params.top_p).min() > 1e-4)
    if params.min_p > 0:
        bound = int(np.clip(-np.log(params.min_p), 0, FARTHEST) * STEPS)
        sure &= not (np.abs(ordered - bound) <= 64).any()
        kept_first = min(kept_first, int(np.searchsorted(ordered, bound, "right")))
    kept = np.sort(order[:kept_first])
    scores = -(top - x[kept]).astype(np.float64) / params.temp + noise(params.seed, pos, kept)
    best = np.argsort(-scores, kind="stable")[:2]
    if len(best) > 1:
        first, second = scores[best]
        sure &= bool(first - second > 1e-4 * max(1.0, abs(first), abs(second)))
    return Pick(int(kept[best[0]]), sure)


def step_of(
    loop: Array, logits: Array, column: int, tokens: Array, pos: Array, capacity: int, chain: Array | None = None, ids: Array | None = None
) -> None:
    """One step of a running loop, in place: the token into its ring, tokens and pos, its status and chain. NaN changes the status alone.
    ids: of the logits."""
    from vkback.ops.sampling.chain import Chain, pick_chain

    sampler = Params.read(loop)
    if chain is None or not chain[0]:
        token = pick(logits, sampler, int(pos[column])).token
    else:
        picked, after = pick_chain(logits, sampler, Chain.read(chain), int(pos[column]))
        token = picked.token
        chain[:] = after.words()
    if token < 0:
        loop[1] = STATUS_NAN
        return
    token = token if ids is None else int(ids[token])
    tokens[column] = token
    pos[column] += 1
    loop[LOOP_RING + loop[0] % capacity] = token
    loop[0] += 1
    if token in sampler.eos:
        loop[1] = STATUS_EOS


def pick_dispatches(
    node: Node,
    ctx: LowerContext,
    logits: Tensor,
    state: Sequence[Arg],
    loop: Sequence[int],
    greedy: bool,
    columns: str = "",
    chain: Sequence[Arg] = (),
    noted: bool = False,
) -> list[Dispatch]:
    """The dispatches of SAMPLE; columns "COLUMNS": of SAMPLE_COLUMNS, for each row of logits; "DRAFTS": the first of SAMPLE_DRAFTS, not
    greedy.

    state, loop  bindings and push constants of shaders/sample/loop.glsl
    chain  that of shaders/sample/chain.glsl, where texts may have chains of samplers
    noted  of columns what is picked is noted alone: the first dispatches of SAMPLE_DRAFTS_COLUMNS, not greedy
    """
    n, vocab = logits.shape
    extra: Defines = {columns: 1, **({"PICKS": 1} if noted else {})} if columns else {}
    if greedy:
        return [argmax_dispatch(node, ctx, logits, state, {"MODE": 1, "LOOP_BIND": 3, **extra}, loop)]
    if vocab > MAX_VOCAB:
        raise PlanError(f"[sample] {logits}: {vocab} tokens, sampling takes at most {MAX_VOCAB}; use temperature 0")
    each = (n,) if columns else ()
    scratch = Arg(Tensor(f"{node.name}.scratch", "I32", (*each, SCRATCH_WORDS + 2 * BINS)), "rw")
    tickets = Arg(Tensor(f"{node.name}.sample_tickets", "I32", (*each, 2), "counter"), "rw")
    listed = Arg(Tensor(f"{node.name}.list", "I32", (*each, vocab)), "rw")
    choice = ctx.tuning.pick("sample", vocab=vocab)
    wg = workgroup_size(ctx.caps, choice["wg_size"], vocab)
    reduce, subgroup = reduction(ctx.caps, wg)

    def step(source: str, ticket: int, args: tuple[Arg, ...], defines: Defines) -> Dispatch:
        chained: Defines = {"CHAIN": 1} if chain else {}
        every: Defines = {
            **defines,
            **extra,
            **chained,
            "WG_SIZE": wg,
            "PER_THREAD": choice["per_thread"],
            "TICKET": ticket,
            "LOOP_BIND": len(args),
        }
        return Dispatch(
            kernel=Variant.of(source, every, subgroup_size=subgroup if defines else None),
            args=(*args, *state, *chain),
            push=pack_push(vocab, *loop),
            groups=(ceil_div(vocab, wg * choice["per_thread"]), n, 1),
            op=node.op,
            label=node.name,
            reason=choice.source,
            nbytes=nbytes(logits),
        )

    return [
        argmax_dispatch(node, ctx, logits, [*state, scratch], {"MODE": 2, "LOOP_BIND": 3, **extra}, loop),
        step("sample/histogram.comp", 0, (Arg(logits), scratch, tickets), {}),
        step("sample/draw.comp", 1, (Arg(logits), scratch, tickets, listed), reduce),
    ]


def tolerance_of(chained: bool) -> Tolerance:
    """Of SAMPLE and its kin; chained: with chains."""
    if chained:
        return Tolerance(1e-8, 1e-4, "mirostat's mu: a logarithm of a sum of f32 exponentials times eta; tokens are judged exactly")
    return Tolerance(0.0, 0.0, "a token is right or wrong; cases avoid close calls (see pick)")


TRIES = 200
"""Draws of a case's logits until the choice is sure."""


@register
class Sample(Op):
    """See the module's text."""

    name = "SAMPLE"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits, loop, tokens, pos, *more = (np.array(i) for i in inputs)
        ids, chain = (more, []) if params.get("ids") else ([], more)
        if loop[1] == STATUS_RUNNING:
            step_of(loop, logits[0], 0, tokens, pos, params["capacity"], chain[0] if chain else None, ids[0] if ids else None)
        return [loop, tokens, pos, *chain]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, loop, tokens, pos, *more = node.inputs
        capacity, greedy = node.params["capacity"], node.params.get("greedy", False)
        if logits.shape[0] != 1:
            raise PlanError(f"[sample] {node.name}: picks one token, got logits {logits}")
        if loop.shape != (LOOP_RING + capacity,):
            raise PlanError(f"[sample] {loop}: expected {LOOP_RING + capacity} words for a ring of {capacity}")
        state = [Arg(loop, "rw"), Arg(tokens, "w"), Arg(pos, "rw")]
        if node.params.get("ids"):
            (ids,) = more
            if not greedy or ids.shape != logits.shape[1:]:
                raise PlanError(f"[sample] {node.name}: {ids} of {logits}; expected an id for each logit, and greedy")
            return [argmax_dispatch(node, ctx, logits, [*state, Arg(ids)], {"MODE": 1, "LOOP_BIND": 3, "IDS": 1}, (capacity,))]
        return pick_dispatches(node, ctx, logits, state, (capacity,), greedy, chain=[Arg(c, "rw") for c in more])

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return tolerance_of(len(node.inputs) > 4 and not node.params.get("ids"))

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1000, 0.0, 40, 0.95, 0.05, 1, greedy=True, seed=1)
        yield self.build_case(151936, 0.0, 40, 0.95, 0.05, 1, greedy=True, seed=2)
        yield self.build_case(1000, 0.0, 40, 0.95, 0.05, 1, greedy=True, kind="nan", seed=3)
        yield self.build_case(1000, 0.0, 40, 0.95, 0.05, 1, kind="eos", greedy=True, seed=4)
        yield self.build_case(1000, 0.0, 40, 0.95, 0.05, 1, kind="stopped", greedy=True, seed=5)
        yield self.build_case(1000, 0.0, 40, 0.95, 0.05, 1, seed=6)
        yield self.build_case(1000, 0.8, 40, 0.95, 0.05, 7, seed=7)
        yield self.build_case(1000, 0.8, 40, 0.95, 0.05, 7, kind="eos", seed=8)
        yield self.build_case(1000, 0.8, 40, 0.95, 0.05, 7, kind="nan", seed=9)
        yield self.build_case(1000, 0.8, 40, 0.95, 0.05, 7, kind="stopped", seed=10)
        yield self.build_case(3000, 1.0, 0, 0.9, 0.0, 2**32 - 1, seed=11)
        yield self.build_case(3000, 1.5, 0, 1.0, 0.0, 3, seed=12)
        yield self.build_case(3000, 0.7, 0, 1.0, 0.1, 4, seed=13)
        yield self.build_case(3000, 2.0, 1, 1.0, 0.0, 5, seed=14)
        yield self.build_case(3000, 1.0, 1000, 1.0, 0.0, 6, seed=15)
        yield self.build_case(3000, 1.0, 50, 0.5, 0.0, 6, kind="ties", seed=16)
        yield self.build_case(1001, 1.0, 20, 0.0, 0.0, 8, kind="masked", seed=17)
        yield self.build_case(151936, 0.8, 40, 0.95, 0.05, 9, seed=18)
        yield self.build_case(3000, 1.0, 7, 1.0, 0.0, 6, kind="ties", seed=19)
        yield self.build_case(3000, 1.0, 2500, 0.99, 0.0, 6, kind="equal", seed=20)
        yield self.build_case(3000, 1.0, 3, 1.0, 0.0, 6, kind="equal", seed=20)
        yield from (self.build_case(1000, 1.0, 40, 0.9, 0.05, i, chain=i, seed=21) for i in range(1, 13))
        yield self.build_case(3000, 1.0, 40, 0.9, 0.05, 9, chain=1, kind="masked", seed=22)
        yield self.build_case(3000, 1.0, 40, 0.9, 0.05, 9, chain=11, kind="ties", seed=23)
        yield self.build_case(1000, 0.8, 40, 0.95, 0.05, 7, chain=13, seed=7)
        for seed, (vocab, kind) in enumerate(((1000, "normal"), (32000, "normal"), (1000, "nan"), (1000, "eos"), (1000, "stopped")), 31):
            yield self.build_case(vocab, 0.0, 40, 0.95, 0.05, 1, greedy=True, kind=kind, seed=seed, ids=True)

    def full_cases(self) -> Iterator[Case]:
        for temp, top_k, top_p, min_p in product((0.5, 1.0), (0, 1, 40), (0.8, 1.0), (0.0, 0.05)):
            for vocab, seed in ((1000, 1), (5003, 2), (32000, 3)):
                yield self.build_case(vocab, temp, top_k, top_p, min_p, seed, seed=seed)
        for chain, vocab, rng in product(range(1, 13), (37, 5003, 32000), (1, 2, 3)):
            yield self.build_case(vocab, 1.0, 50, 0.8, 0.01, rng, chain=chain, seed=rng)
        yield self.build_case(151936, 1.0, 40, 0.9, 0.05, 3, chain=1)

    def build_case(
        self,
        vocab: int,
        temp: float,
        top_k: int,
        top_p: float,
        min_p: float,
        rng: int,
        greedy: bool = False,
        kind: str = "normal",
        chain: int = 0,
        seed: int = 1,
        ids: bool = False,
    ) -> Case:
        """rng: the sampler's seed; kind: normal; nan; stopped (status set before); ties (logits on a grid of 1/2); equal (most are); masked
        (most -inf); eos (the pick is one). chain: 0: none; else the number of an example in chain.py, or 13 for an empty chain. ids: tokens
        have other ids than the places of their logits."""
        from vkback.ops.sampling.chain import CHAIN_WORDS, EXAMPLES, Chain, pick_chain

        if not 0 <= chain <= len(EXAMPLES) + 1:
            raise CaseLineError(f"SAMPLE: chain={chain}: expected 0 to {len(EXAMPLES) + 1}")
        if ids and (chain or not greedy):
            raise CaseLineError(f"SAMPLE: ids with chain={chain}, greedy={greedy}: expected no chain, and greedy")
        capacity, sampler = 5, Params(temp, top_k, top_p, min_p, rng, ())
        samplers = ((*EXAMPLES, Chain())[chain - 1]) if chain else Chain()

        def make(generator: np.random.Generator) -> Problem:
            tensors: tuple[Tensor, ...] = (
                Tensor("result_output", "F32", (1, vocab)),
                *(Tensor(name, "I32", (size,), "input") for name, size in (("loop", LOOP_RING + capacity), ("tokens", 1), ("pos", 1))),
            )
            pos = 77
            for _ in range(TRIES):
                x = (3 * generator.standard_normal((1, vocab))).astype(np.float32)
                if kind == "ties":
                    x = np.round(2 * x) / np.float32(2)
                elif kind == "equal":
                    x = np.minimum(x, np.float32(-3))
                elif kind == "masked":
                    x[0, generator.permutation(vocab)[10:]] = -np.inf
                elif kind == "nan":
                    x[0, vocab - 1] = np.nan
                picked = pick_chain(x[0], sampler, samplers, pos)[0] if samplers.order else pick(x[0], sampler, pos)
                if picked.sure:
                    break
            else:
                raise CaseLineError(f"SAMPLE: in {TRIES} tries no choice that rounding cannot change; expected other parameters")
            id_of = (vocab + generator.permutation(vocab)).astype(np.int32)
            loop = sampler.words(capacity)
            loop[0] = 7
            loop[LOOP_RING:] = -1
            if kind == "eos":
                loop[LOOP_PARAMS + 5] = 2
                loop[LOOP_EOS : LOOP_EOS + 2] = (3 * vocab, id_of[picked.token] if ids else picked.token)
            elif kind == "stopped":
                loop[1] = STATUS_EOS
            values: dict[str, Array] = {"result_output": x, "loop": loop, "tokens": np.full(1, 3, np.int32)}
            values["pos"] = np.full(1, pos, np.int32)
            if chain:
                tensors = (*tensors, Tensor("chain", "F32", (CHAIN_WORDS,), "input"))
                values["chain"] = samplers.words()
            given, params = tensors, {"capacity": capacity, "greedy": greedy}
            if ids:
                given, params = (*tensors, Tensor("ids", "I32", (vocab,), "input")), params | {"ids": True}
                values["ids"] = id_of
            return Problem(Node(self.name, given, tensors[1:], params), values)

        shown = {
            "vocab": vocab,
            "temp": temp,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "rng": rng,
            "greedy": greedy,
            "kind": kind,
            "chain": chain,
            "seed": seed,
        } | ({"ids": True} if ids else {})
        return Case(self.name, shown, make, seed)

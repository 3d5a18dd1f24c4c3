"""How the next token is picked: the settings, the nodes that do it on the device, and the state of the loop that they keep there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.graph import Graph, Tensor
from vkback.ops.sampling.chain import CHAIN_WORDS, LONGEST, Chain
from vkback.ops.sampling.dry import Dry, dry_words
from vkback.ops.sampling.lookup import DRAFT_WORDS
from vkback.ops.sampling.penalties import SEEN_COUNTS, Penalties, mask_words
from vkback.ops.sampling.sample import LOOP_EOS, LOOP_PARAMS, LOOP_RING

EARLIER = 8192
"""Tokens of earlier texts that are kept to draft from."""

RING = 4096
"""Token ids the loop state keeps: more than all submits in flight can make."""


class SamplerError(VkbackError):
    """Settings that the loop on the device cannot hold."""


SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""All there are, in the order in which they run unless somebody asks for another."""

FIRST = ("penalties", "dry")
"""Those that change logits: they run before the others, wherever they stand."""


@dataclass(frozen=True, kw_only=True)
class ChainSettings:
    """Samplers that are off unless asked for; names and defaults are llama.cpp's, rules in vkback/ops/sampling/chain.py and dry.py.

    samplers  which run, in this order, of SAMPLERS; None: all, in theirs
    """

    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    samplers: tuple[str, ...] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Those by name."""
        return {field.name: getattr(self, field.name) for field in fields(ChainSettings)}


@dataclass(frozen=True)
class Sampler(ChainSettings):
    """How the next token is picked. temp 0: the largest logit. top_k 0, top_p 1 and min_p 0 switch the filters off.

    repeat_penalty, presence_penalty, frequency_penalty
                of tokens among the last `penalty_last_n` of the text (-1: all of it; vkback/ops/sampling/penalties.py); 1, 0 and 0: none
    logit_bias  (token id, what is added to its logit): before everything else; -inf bans a token
    """

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the token is that of the largest logit."""
        if self.temp > 0.0 or self._ranges:
            return False
        return self.mirostat > 0 or ("temperature" in self._order and not self._excludes)

    @property
    def _order(self) -> tuple[str, ...]:
        return SAMPLERS if self.samplers is None else self.samplers

    @property
    def _excludes(self) -> bool:
        return "xtc" in self._order and self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def _ranges(self) -> bool:
        return "temperature" in self._order and self.dynatemp_range > 0

    @property
    def chained(self) -> bool:
        """Whether the choice is that of a chain of samplers: others than top-k, top-p, min-p and temperature, or in another order."""
        if self.greedy:
            return False
        others = self._excludes or self._ranges or self.typical_p < 1 or self.top_n_sigma > 0
        asked = [name for name in self._order if name not in FIRST]
        return self.mirostat > 0 or others or asked != [name for name in SAMPLERS if name not in FIRST]

    @property
    def moves(self) -> bool:
        """Whether each token changes how the next one is picked, so that no drafts can be had: with mirostat."""
        return self.chained and self.mirostat > 0

    @property
    def chain(self) -> Chain:
        """That, with what it needs; empty where there is none."""
        if not self.chained:
            return Chain()
        order: tuple[str, ...] = ("temperature", "mirostat" if self.mirostat == 1 else "mirostat_v2")
        if not self.mirostat:
            does = {
                "top_k": self.top_k > 0,
                "top_p": self.top_p < 1,
                "min_p": self.min_p > 0,
                "typ_p": self.typical_p < 1,
                "top_n_sigma": self.top_n_sigma > 0,
                "xtc": self._excludes,
                "temperature": self.temp != 1 or self._ranges,
            }
            order = tuple(name for name in self._order if does.get(name))
        if not order:
            order = ("temperature",)  # of 1, which changes nothing
        return Chain(
            order,
            2 * self.mirostat_tau,
            self.typical_p,
            self.xtc_probability,
            self.xtc_threshold,
            self.top_n_sigma,
            self.dynatemp_range if "temperature" in self._order else 0.0,
            self.dynatemp_exponent,
            self.mirostat_tau,
            self.mirostat_eta,
            self.temp if "temperature" in self._order or self.mirostat else 1.0,
        )

    @property
    def dries(self) -> bool:
        """Whether tokens that lengthen a repetition lose of their logits."""
        return "dry" in self._order and self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    def dry(self, n_ctx: int) -> Dry:
        """By how much, in a context of so many tokens."""
        last_n = n_ctx if self.dry_penalty_last_n < 0 else min(self.dry_penalty_last_n, n_ctx)
        return Dry(self.dry_multiplier if self.dries else 0.0, self.dry_base, self.dry_allowed_length, last_n)

    @property
    def penalizes(self) -> bool:
        """Whether logits are changed before the choice by a bias or penalties."""
        return bool(self.logit_bias) or self._penalizes

    @property
    def _penalizes(self) -> bool:
        others = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return others and self.penalty_last_n != 0 and "penalties" in self._order

    def bias(self, n_vocab: int) -> npt.NDArray[np.float32]:
        """What is added to the logit of each token."""
        bias = np.zeros(n_vocab, np.float32)
        for token, value in self.logit_bias:
            bias[token] += value
        return bias

    def penalties(self, n_ctx: int) -> Penalties:
        """The penalties in a context of so many tokens."""
        last_n = n_ctx if self.penalty_last_n < 0 else min(self.penalty_last_n, n_ctx)
        if not self._penalizes:
            return Penalties(1.0, 0.0, 0.0, last_n)
        return Penalties(self.repeat_penalty, self.presence_penalty, self.frequency_penalty, last_n)


SURE = ", at least "
"""Of a draft model's tokens: before the probability that they must have."""

PENALIZED, CONSTRAINED, DRIED, CHAINED = ", penalties", ", mask", ", dry", ", chain"
"""Parts of a kind of loop: logits are changed before the choice; some tokens are taken out; repetitions lose; a chain of samplers picks."""


def loop_kind(sampler: Sampler, constrained: bool = False) -> str:
    """ "greedy" or "sample", with PENALIZED where logits are changed before, CONSTRAINED where tokens are taken out, DRIED, which needs the
    first, and CHAINED."""
    parts = {
        PENALIZED: sampler.penalizes or constrained or sampler.dries,
        CONSTRAINED: constrained,
        DRIED: sampler.dries,
        CHAINED: sampler.chained,
    }
    return ("greedy" if sampler.greedy else "sample") + "".join(part for part, there in parts.items() if there)


def sure_kind(kind: str, p_min: float) -> str:
    """A kind whose tokens are left out from the first on that has less than this probability; 0: none is."""
    return f"{kind}{SURE}{p_min!r}" if p_min else kind


def least_probability(kind: str) -> float:
    """Of a kind's tokens."""
    return float(kind.partition(SURE)[2] or 0)


def add_sampler(
    graph: Graph,
    *,
    greedy: bool,
    penalties_ctx: int | None = None,
    masked: bool = False,
    dried: bool = False,
    chained: bool = False,
    p_min: float = 0.0,
    ids: Tensor | None = None,
) -> None:
    """Append the SAMPLE node: it picks the next token from the logits and advances tokens, pos and loop in place.

    penalties_ctx  rows of the cache; with it PENALTIES comes before, which if masked takes tokens out
    dried          and DRY behind that
    chained        SAMPLE has a chain of samplers
    p_min          DRAFT_P_MIN comes behind
    ids            I32, the id of each token that there are logits of, where it is not its place; greedy
    """
    logits = graph.outputs[0]
    tokens, pos = Tensor("tokens", "I32", (1,), "input"), Tensor("pos", "I32", (1,), "input")
    loop = Tensor("loop", "I32", (LOOP_RING + RING,), "input")
    if penalties_ctx is not None:
        vocab = logits.shape[-1]
        bias = Tensor("bias", "F32", (vocab,), "input")
        seen = Tensor("seen", "I32", (SEEN_COUNTS + vocab + penalties_ctx,), "input")
        penalized = Tensor("result_penalized", "F32", logits.shape)
        mask = (Tensor("mask", "I32", (mask_words(vocab),), "input"),) if masked else ()
        graph.add("PENALTIES", (logits, bias, seen, loop, tokens, pos, *mask), (penalized, seen))
        logits = penalized
        if dried:
            dry = Tensor("dry", "I32", (dry_words(vocab),), "input")
            graph.add("DRY", (logits, seen, loop, pos, dry), (logits, dry))
    state = (loop, tokens, pos, *((Tensor("chain", "F32", (CHAIN_WORDS,), "input"),) if chained else ()))
    named, how = ((), {}) if ids is None else ((ids,), {"ids": True})
    graph.add("SAMPLE", (logits, *state, *named), state, capacity=RING, greedy=greedy, **how)
    if p_min:
        graph.add("DRAFT_P_MIN", (logits, loop), (loop,), capacity=RING, p_min=p_min, **how)


def draft_words(n_ctx: int) -> int:
    """Words of LOOKUP's `text` before the context's own: earlier texts, or a draft for each position."""
    return max(EARLIER + 1, n_ctx)


def add_drafts(
    graph: Graph,
    columns: int,
    *,
    greedy: bool,
    n_ctx: int,
    penalties: bool = False,
    masked: bool = False,
    dried: bool = False,
    chained: bool = False,
) -> None:
    """Make a graph of so many tokens, with the logits of all, a step with drafts: LOOKUP before it, SAMPLE_DRAFTS behind it.

    n_ctx      rows of the cache
    penalties  PENALTIES_DRAFTS comes before the choice, which if masked takes tokens out of each column
    dried      and DRY_DRAFTS behind that
    chained    SAMPLE_DRAFTS has a chain of samplers
    """
    logits = graph.outputs[0]
    tokens, pos = (Tensor(name, "I32", (columns,), "input") for name in ("tokens", "pos"))
    loop, draft = Tensor("loop", "I32", (LOOP_RING + RING,), "input"), Tensor("draft", "I32", (DRAFT_WORDS,), "input")
    text = Tensor("text", "I32", (draft_words(n_ctx) + n_ctx,), "input")
    graph.add("LOOKUP", (text, draft, loop, tokens, pos), (text, draft, tokens, pos), before=draft_words(n_ctx), capacity=RING)
    graph.nodes.insert(0, graph.nodes.pop())
    counted: tuple[Tensor, ...] = ()
    if penalties:
        vocab = logits.shape[-1]
        bias = Tensor("bias", "F32", (vocab,), "input")
        seen = Tensor("seen", "I32", (SEEN_COUNTS + vocab + n_ctx,), "input")
        penalized = Tensor("result_penalized", "F32", logits.shape)
        masks = (Tensor("masks", "I32", (columns, mask_words(vocab)), "input"),) if masked else ()
        graph.add("PENALTIES_DRAFTS", (logits, bias, seen, loop, tokens, pos, *masks), (penalized,))
        logits, counted = penalized, (seen,)
        if dried:
            dry = Tensor("dry", "I32", (dry_words(vocab),), "input")
            graph.add("DRY_DRAFTS", (logits, seen, loop, pos, dry, tokens), (logits,))
    state = (loop, tokens, pos, draft, *counted)
    chain = (Tensor("chain", "F32", (CHAIN_WORDS,), "input"),) if chained else ()
    graph.add("SAMPLE_DRAFTS", (logits, *state, *chain), state, capacity=RING, greedy=greedy, chained=chained)


def loop_state(sampler: Sampler, eos: Sequence[int]) -> npt.NDArray[np.int32]:
    """The generation loop's state before its first token. Raises SamplerError where the model has too many end-of-text ids, or a chain has
    too many samplers."""
    if len(sampler.chain.order) > LONGEST:
        raise SamplerError(f"[sampler] {len(sampler.chain.order)} samplers, at most {LONGEST} are supported")
    if len(eos) > LOOP_RING - LOOP_EOS:
        raise SamplerError(f"[sampler] {len(eos)} end-of-text ids, at most {LOOP_RING - LOOP_EOS} are supported")
    words = np.zeros(LOOP_RING + RING, np.int32)
    temp = 1.0 if sampler.chained else sampler.temp  # a chain has its own
    params: tuple[Any, ...] = (temp, sampler.top_k, sampler.top_p, sampler.min_p, sampler.seed & 0xFFFFFFFF, len(eos))
    words[LOOP_PARAMS : LOOP_PARAMS + 6] = np.frombuffer(struct.pack("<fiffIi", *params), np.int32)
    words[LOOP_EOS : LOOP_EOS + len(eos)] = eos
    return words

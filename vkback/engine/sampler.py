"""How the next token is picked: the settings, the nodes that do it on the device, and the state of the loop that they keep there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.graph import Graph, Tensor
from vkback.ops.sampling.lookup import DRAFT_WORDS
from vkback.ops.sampling.penalties import SEEN_COUNTS, Penalties, mask_words
from vkback.ops.sampling.sample import LOOP_EOS, LOOP_PARAMS, LOOP_RING

EARLIER = 8192
"""Tokens of earlier texts that are kept to draft from."""

RING = 4096
"""Token ids the loop state keeps: more than all submits in flight can make."""


class SamplerError(VkbackError):
    """Settings that the loop on the device cannot hold."""


@dataclass(frozen=True)
class Sampler:
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
        return self.temp <= 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits are changed before the choice."""
        others = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return bool(self.logit_bias) or (others and self.penalty_last_n != 0)

    def bias(self, n_vocab: int) -> npt.NDArray[np.float32]:
        """What is added to the logit of each token."""
        bias = np.zeros(n_vocab, np.float32)
        for token, value in self.logit_bias:
            bias[token] += value
        return bias

    def penalties(self, n_ctx: int) -> Penalties:
        """The penalties in a context of so many tokens."""
        last_n = n_ctx if self.penalty_last_n < 0 else min(self.penalty_last_n, n_ctx)
        return Penalties(self.repeat_penalty, self.presence_penalty, self.frequency_penalty, last_n)


PENALIZED, CONSTRAINED = ", penalties", ", mask"
"""Ends of a kind of loop: logits are changed before the choice; some tokens are taken out."""


def loop_kind(sampler: Sampler, constrained: bool = False) -> str:
    """ "greedy" or "sample", with PENALIZED where logits are changed before, and CONSTRAINED where tokens are taken out."""
    kind = "greedy" if sampler.greedy else "sample"
    return kind + (PENALIZED if sampler.penalizes or constrained else "") + (CONSTRAINED if constrained else "")


def add_sampler(graph: Graph, *, greedy: bool, penalties_ctx: int | None = None, masked: bool = False) -> None:
    """Append the SAMPLE node: it picks the next token from the logits and advances tokens, pos and loop in place. penalties_ctx: rows of
    the cache; with it PENALTIES comes before, which if masked takes tokens out."""
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
    graph.add("SAMPLE", (logits, loop, tokens, pos), (loop, tokens, pos), capacity=RING, greedy=greedy)


def draft_words(n_ctx: int) -> int:
    """Words of LOOKUP's `text` before the context's own: earlier texts, or a draft for each position."""
    return max(EARLIER + 1, n_ctx)


def add_drafts(graph: Graph, columns: int, *, greedy: bool, n_ctx: int, penalties: bool = False) -> None:
    """Make a graph of so many tokens, with the logits of all, a step with drafts: LOOKUP before it, SAMPLE_DRAFTS behind it.

    n_ctx      rows of the cache
    penalties  PENALTIES_DRAFTS comes before the choice
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
        graph.add("PENALTIES_DRAFTS", (logits, bias, seen, loop, tokens, pos), (penalized,))
        logits, counted = penalized, (seen,)
    state = (loop, tokens, pos, draft, *counted)
    graph.add("SAMPLE_DRAFTS", (logits, *state), state, capacity=RING, greedy=greedy)


def loop_state(sampler: Sampler, eos: Sequence[int]) -> npt.NDArray[np.int32]:
    """The generation loop's state before its first token. Raises SamplerError where the model has too many end-of-text ids."""
    if len(eos) > LOOP_RING - LOOP_EOS:
        raise SamplerError(f"[sampler] {len(eos)} end-of-text ids, at most {LOOP_RING - LOOP_EOS} are supported")
    words = np.zeros(LOOP_RING + RING, np.int32)
    params: tuple[Any, ...] = (sampler.temp, sampler.top_k, sampler.top_p, sampler.min_p, sampler.seed & 0xFFFFFFFF, len(eos))
    words[LOOP_PARAMS : LOOP_PARAMS + 6] = np.frombuffer(struct.pack("<fiffIi", *params), np.int32)
    words[LOOP_EOS : LOOP_EOS + len(eos)] = eos
    return words

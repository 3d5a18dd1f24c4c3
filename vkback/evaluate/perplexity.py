"""Perplexity of a text: the exponential of the mean negative log probability of its tokens, each given those before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError

Logits = Callable[[Sequence[int], int], npt.NDArray[Any]]
"""(ids, first) -> logits [len(ids) - first, n_vocab] of positions first.. of `ids` in a fresh context."""


OnScored = Callable[[npt.NDArray[Any], npt.NDArray[Any]], object]
"""(logits [n, n_vocab], tokens [n] that came next) of the scored part of a chunk."""


class PerplexityError(VkbackError):
    """A text too short to be scored."""


@dataclass(frozen=True)
class Perplexity:
    """value +- error (one standard error of the mean), over `tokens` scored tokens."""

    value: float
    error: float
    tokens: int


def perplexity(
    ids: Sequence[int],
    logits: Logits,
    *,
    bos: int | None,
    n_ctx: int = 512,
    n_chunks: int | None = None,
    on_chunk: Callable[[float], None] | None = None,
    on_scored: OnScored | None = None,
) -> Perplexity:
    """Score `ids` in chunks of n_ctx, as llama-perplexity does: the first id of a chunk is replaced by BOS, and only tokens with at least
    half a chunk before them count (positions n_ctx/2 .. n_ctx-2 predict the token after).

    on_chunk   called with the perplexity so far after every chunk
    on_scored  called with the logits and the tokens that are scored by them, of every chunk
    Raises PerplexityError when the text has not one chunk.
    """
    chunks = count_chunks(ids, n_ctx, n_chunks)
    if chunks == 0:
        raise PerplexityError(
            f"[perplexity] the text has {len(ids)} tokens, one chunk takes {n_ctx}; give a longer text or a smaller context"
        )
    losses: list[npt.NDArray[np.float64]] = []
    first = n_ctx // 2
    for c in range(chunks):
        chunk = list(ids[c * n_ctx : (c + 1) * n_ctx])
        targets = np.array(chunk[first + 1 :])
        if bos is not None:
            chunk[0] = bos
        found = logits(chunk, first)[: len(targets)]
        losses.append(_loss(np.asarray(found, np.float64), targets))
        if on_scored is not None:
            on_scored(found, targets)
        if on_chunk is not None:
            on_chunk(math.exp(float(np.mean(np.concatenate(losses)))))
    all_losses = np.concatenate(losses)
    value = math.exp(float(all_losses.mean()))
    error = value * float(all_losses.std(ddof=1)) / math.sqrt(len(all_losses)) if len(all_losses) > 1 else 0.0
    return Perplexity(value, error, len(all_losses))


def count_chunks(ids: Sequence[int], n_ctx: int, n_chunks: int | None = None) -> int:
    """Whole chunks of a text, at most n_chunks."""
    return len(ids) // n_ctx if n_chunks is None else min(n_chunks, len(ids) // n_ctx)


def _loss(logits: npt.NDArray[np.float64], targets: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """logits [n, n_vocab], targets [n] -> negative log probability of each target."""
    top = logits.max(axis=-1)
    norm = np.log(np.exp(logits - top[:, None]).sum(axis=-1)) + top
    picked = logits[np.arange(len(targets)), targets]
    loss: npt.NDArray[np.float64] = norm - picked
    return loss

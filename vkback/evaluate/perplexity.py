"""Perplexity of a text: the exponential of the mean negative log probability of its tokens, each given those before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.units import counted

Logits = Callable[[Sequence[Sequence[int]], int], Iterator[npt.NDArray[Any]]]
"""(chunks, first) -> logits [len(chunk) - first, n_vocab] of positions first.. of each chunk in a fresh context, one chunk after the other.
How many of them go through the model side by side is its affair."""


OnScored = Callable[[npt.NDArray[Any], npt.NDArray[Any]], object]
"""(logits [n, n_vocab], tokens [n] that came next) of the scored part of a chunk."""


LOSSES_AT_ONCE = 4
"""Chunks whose losses are added up at the same time, each by a thread: of a large vocabulary that takes longer than a GPU reads a chunk."""


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
    Losses of a chunk are added up while the model reads the next ones.
    Raises PerplexityError when the text has not one chunk.
    """
    chunks = count_chunks(ids, n_ctx, n_chunks)
    if chunks == 0:
        raise PerplexityError(
            f"[perplexity] the text has {counted(len(ids), 'token')}, one chunk takes {n_ctx}; give a longer text or a smaller chunk"
        )
    losses: list[npt.NDArray[np.float64]] = []
    first = n_ctx // 2
    texts = [list(ids[c * n_ctx : (c + 1) * n_ctx]) for c in range(chunks)]
    if bos is not None:
        texts = [[bos, *text[1:]] for text in texts]
    coming: deque[Future[npt.NDArray[np.float64]]] = deque()

    def take() -> None:
        losses.append(coming.popleft().result())
        if on_chunk is not None:
            on_chunk(math.exp(float(np.mean(np.concatenate(losses)))))

    with ThreadPoolExecutor(LOSSES_AT_ONCE) as pool:
        for text, found in zip(texts, logits(texts, first), strict=True):
            targets = np.array(text[first + 1 :])
            scored = found[: len(targets)]
            coming.append(pool.submit(token_losses, scored, targets))
            if on_scored is not None:
                on_scored(scored, targets)
            while len(coming) > LOSSES_AT_ONCE or (coming and coming[0].done()):
                take()
        while coming:
            take()
    all_losses = np.concatenate(losses)
    value = math.exp(float(all_losses.mean()))
    error = value * float(all_losses.std(ddof=1)) / math.sqrt(len(all_losses)) if len(all_losses) > 1 else 0.0
    return Perplexity(value, error, len(all_losses))


def count_chunks(ids: Sequence[int], n_ctx: int, n_chunks: int | None = None) -> int:
    """Whole chunks of a text, at most n_chunks."""
    return len(ids) // n_ctx if n_chunks is None else min(n_chunks, len(ids) // n_ctx)


def token_losses(logits: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """logits [n, n_vocab], targets [n] -> negative log probability of each target, summed in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1)
    norm = np.log(np.exp(logits - top[:, None]).sum(axis=-1)) + top
    picked = logits[np.arange(len(targets)), targets]
    loss: npt.NDArray[np.float64] = norm - picked
    return loss

"""How likely a given text is, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vkback.engine.engine import Engine


@dataclass(frozen=True)
class Score:
    """tokens: those of the text that have a probability: all, but of a text with nothing before it, not even a beginning-of-text token,
    the first. logprobs: the natural logarithm of each one's probability after all before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def sum(self) -> float:
        """Of the whole text."""
        return float(np.sum(self.logprobs))

    @property
    def mean(self) -> float:
        """Of a token; 0 without any."""
        return self.sum / len(self.logprobs) if self.logprobs else 0.0


def score(engine: Engine, ids: Sequence[int], first: int) -> Score:
    """Of tokens `first`, at least 1, and on. Logits are on the host for a piece of the text at a time."""
    return Score(tuple(ids[first:]), tuple(_logprobs(engine, ids, first)))


def _logprobs(engine: Engine, ids: Sequence[int], first: int) -> Iterator[float]:
    engine.prompt(ids[: first - 1])
    for at in range(first - 1, len(ids) - 1, engine.ubatch):
        piece = ids[at : min(at + engine.ubatch, len(ids) - 1)]
        logits = engine.prompt_logits(piece).astype(np.float64)
        top = logits.max(1)
        sums = top + np.log(np.exp(logits - top[:, None]).sum(1))
        yield from (float(row[token] - total) for row, token, total in zip(logits, ids[at + 1 :], sums, strict=False))

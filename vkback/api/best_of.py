"""The likeliest of several texts of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkback.api import given
from vkback.api.options import GenerateOptions
from vkback.api.result import Result


def likeliest(results: Sequence[Result], n: int) -> list[Result]:
    """Those n of a prompt's texts whose tokens are the likeliest on average, the best first; all in their order where there are n. They
    have log probabilities."""
    if len(results) <= n:
        return list(results)

    def likely(result: Result) -> float:
        return sum(t.logprob for t in result.logprobs) / max(1, len(result.logprobs))

    return sorted(results, key=likely, reverse=True)[:n]


@dataclass(frozen=True)
class BestOf:
    """n of `made` texts for each prompt. options: those of the texts, which tell the log probabilities of their tokens where they are to be
    compared; shown: whether the caller asked for them."""

    n: int
    made: int
    options: GenerateOptions
    shown: bool

    @classmethod
    def of(cls, n: int, best_of: int | None, options: GenerateOptions) -> BestOf:
        """best_of: texts that are made, None: n. Raises ModelError for numbers that cannot be."""
        n = given.whole("n", n, "a whole number, 1 or more", 1)
        made = n if best_of is None else given.whole("best_of", best_of, f"a whole number, at least n, which is {n}", n)
        shown = made == n or options.get("logprobs") is not None
        return cls(n, made, options if shown else {**options, "logprobs": 0}, shown)

    def chosen(self, results: Sequence[Result]) -> list[Result]:
        """Of all texts, those of each prompt one after another."""
        found = [r for at in range(0, len(results), self.made) for r in likeliest(results[at : at + self.made], self.n)]
        return found if self.shown else [replace(r, logprobs=()) for r in found]

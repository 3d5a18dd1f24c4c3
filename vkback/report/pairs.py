"""Two things that ran in turn, judged pair by pair: Wilcoxon's signed-rank test on the logarithms of their ratios.

Chance decides which of a pair runs first. Where both are the same, whatever the machine does meanwhile (load that comes and goes, clocks
that fall) then raises or lowers each ratio equally likely, so that the test is exact under any drift. Ranks bound what a pair can do
during which the load changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

FALSE_ALARM = 0.005
"""Chance that a run, all of its tests together, calls two things different that are not: one in 200."""


PAIRS = 40
"""So many find 2 % in 95 of 100 commands on a machine whose load comes and goes, where runs differ by 1 % by themselves
(tests/unit/test_pairs.py)."""


@dataclass(frozen=True)
class PairedVerdict:
    """How much faster the second is. different: None where so few pairs cannot tell.

    percent     of the median of all means of two ratios (Hodges and Lehmann's estimate)
    low, high   the interval that holds it with `confidence`; infinite where there are too few pairs
    p           of the signed-rank test
    """

    different: bool | None
    percent: float
    low: float
    high: float
    p: float
    pairs: int
    confidence: float

    @property
    def text(self) -> str:
        if self.different is None:
            return f"{self.pairs} pairs cannot tell"
        return f"{self.low:+.2f} to {self.high:+.2f} %"


def in_turn(pairs: int, seed: int) -> Iterator[tuple[int, int]]:
    """Which of two runs first, and which second, of each pair: as often the one as the other."""
    first = np.random.default_rng(seed).permutation([i % 2 for i in range(pairs)])
    for one in first.tolist():
        yield one, 1 - one


def paired_verdict(first: Sequence[float], second: Sequence[float], tests: int = 1) -> PairedVerdict:
    """Of speeds, those of a pair at the same place. tests: of the run; FALSE_ALARM is divided among them (Bonferroni)."""
    alpha = FALSE_ALARM / tests
    ratios = np.log(np.asarray(second, float)) - np.log(np.asarray(first, float))
    n = len(ratios)
    walsh = np.sort(((ratios[:, None] + ratios[None, :]) / 2)[np.triu_indices(n)])
    # Of the sum of positive ranks, the number of means of two ratios that are above zero; one that is zero counts half.
    above = float(np.count_nonzero(walsh > 0)) + np.count_nonzero(walsh == 0) / 2
    tail = _tail(n)
    p = min(1.0, 2 * float(tail[math.floor(min(above, len(walsh) - above))]))
    cut = int(np.searchsorted(tail, alpha / 2, side="right"))  # of so many smallest and largest means none is in the interval
    low, high = (walsh[cut - 1], walsh[-cut]) if cut else (-math.inf, math.inf)
    different = None if not cut else bool(low > 0 or high < 0)
    return PairedVerdict(different, _percent(float(np.median(walsh))), _percent(float(low)), _percent(float(high)), p, n, 1 - alpha)


def least_pairs(tests: int = 1) -> int:
    """Fewer pairs cannot tell, whatever they give."""
    return math.ceil(1 - math.log2(FALSE_ALARM / tests))


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio) if log_ratio < 700 else math.inf


@cache
def _tail(n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """P(sum of positive ranks <= s) for s from 0 on, when every sign is as likely as the other."""
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = (np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))) / 2
    return np.cumsum(ways)

"""Verdicts on runs in turn, under load that comes and goes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from vkback.report.pairs import FALSE_ALARM, PAIRS, in_turn, least_pairs, paired_verdict


def machine(rng: np.random.Generator) -> Callable[[], float]:
    """How slow a machine is from run to run: load that comes and goes (a third slower), clocks that wander and fall slowly, and jitter of
    1 % with a run in fifty that takes half as long again."""
    wander, loaded, falling = 0.0, False, rng.uniform(-0.004, 0.004)

    def slowness() -> float:
        nonlocal wander, loaded
        wander += falling + rng.normal(0, 0.004)
        loaded = loaded != (rng.random() < 0.05)
        jitter = rng.normal(0, 0.01) + (0.4 if rng.random() < 0.02 else 0.0)
        return math.exp(wander + 0.37 * loaded + jitter)

    return slowness


def measured(seed: int, faster: float = 0.0) -> tuple[list[float], list[float]]:
    """Speeds of two builds in turn, the second so much faster (0.02: 2 %)."""
    rng = np.random.default_rng(seed)
    slowness = machine(rng)
    speeds: tuple[list[float], list[float]] = ([], [])
    for pair in in_turn(PAIRS, seed):
        for which in pair:
            speeds[which].append((100.0 * (1 + faster) if which else 100.0) / slowness())
    return speeds


def test_one_build_against_itself_is_called_different_in_at_most_one_of_a_hundred_runs() -> None:
    called = sum(paired_verdict(*measured(seed)).different is True for seed in range(1000))
    assert called <= 10


def test_two_percent_are_found_in_95_of_100_runs() -> None:
    verdicts = [paired_verdict(*measured(seed, faster=0.02)) for seed in range(1000, 2000)]
    assert sum(v.different is True and v.percent > 0 for v in verdicts) >= 950
    inside = sum(v.low <= 2.0 <= v.high for v in verdicts)
    assert inside >= 980  # 99.5 % are promised


def test_runs_one_build_behind_the_other_would_tell_of_the_load() -> None:
    """What alternating is for: the same machine, ten runs of one and then ten of the other, by Welch's test at 1 %."""
    from vkback.report.bench_table import deviation
    from vkback.report.compare import Speed, change_between

    def block(slowness: Callable[[], float]) -> Speed:
        samples = [100 / slowness() for _ in range(10)]
        return Speed(float(np.mean(samples)), deviation(samples), 10)

    called = 0
    for seed in range(200):
        slowness = machine(np.random.default_rng(seed))
        called += change_between(block(slowness), block(slowness)).beats_noise is True
    assert called > 50


@pytest.mark.parametrize("tests", (1, 8))
def test_few_pairs_cannot_tell(tests: int) -> None:
    least = least_pairs(tests)
    before, after = [100.0] * least, [200.0 + i for i in range(least)]
    assert paired_verdict(before, after, tests).different is True
    few = paired_verdict(before[1:], after[1:], tests)
    assert few.different is None and few.text == f"{least - 1} pairs cannot tell"


def test_equal_runs_are_not_different_and_the_interval_says_within_what() -> None:
    same = paired_verdict([100.0] * 10, [100.0] * 10)
    assert (same.different, same.percent, same.low, same.high, same.p) == (False, 0.0, 0.0, 0.0, 1.0)
    known = paired_verdict([100.0] * 12, [101.0] * 12)
    assert known.different is True and known.percent == pytest.approx(1.0) and known.p == pytest.approx(2 * 0.5**12)
    assert known.confidence == 1 - FALSE_ALARM and known.text == "+1.00 to +1.00 %"


def test_both_are_as_often_first() -> None:
    assert sum(first for first, _ in in_turn(PAIRS, 3)) == PAIRS // 2
    assert list(in_turn(PAIRS, 3)) != list(in_turn(PAIRS, 4))

"""Searches replayed on a recorded space: which finds what, in how many evaluations.

An evaluation is a point that is compiled and timed; a point that a search has seen, or that the space has not, costs nothing. A point has
its recorded time, as in Kernel Tuner's simulation mode: how far noise misleads a search is no question here, a duel answers it. Besides
ours there are the baselines of the field: random search, iterated local search (greedy, with random restarts nearby) and simulated
annealing, as Kernel Tuner has them, too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from vkback.autotune.search import Search, SweepError
from vkback.autotune.spaces import Space, Values, differ_in_one
from vkback.timing.launches import Measurement

RUNS = 100
WITHIN = (0.05, 0.01)
"""Shares of the optimum's time above it that count as found."""
MARKS = (10, 25, 50, 100)
"""Evaluations after which the best is compared with the optimum."""
LIMIT = 500
"""Evaluations of a run, at most, unless somebody says how many."""
KICK = 2
"""Parameters that iterated local search changes at random where it is stuck."""
HOT, COOL = 0.5, 0.97
"""Annealing: the relative loss that is accepted with probability 1/e at first, and what becomes of it with each evaluation."""


class _Spent(Exception):  # noqa: N818  an end, no fault
    """All evaluations are used."""


class Replay:
    """A space whose points cost an evaluation each. seen: what was measured, in order."""

    def __init__(self, space: Space, rng: random.Random, limit: int) -> None:
        self.space, self.rng, self._limit = space, rng, limit
        self.seen: dict[Values, float] = {}
        self.tried = 0

    def knows(self, point: Values) -> bool:
        return point in self.space.times or point in self.space.invalid

    def time(self, point: Values) -> float:
        """Microseconds of a point; infinite for one that has no right result. Raises _Spent."""
        if point in self.seen:
            return self.seen[point]
        if self.tried >= self._limit:
            raise _Spent
        self.tried += 1
        self.seen[point] = self.space.times.get(point, (math.inf, 0.0))[0]
        return self.seen[point]


Strategy = Callable[[Replay], None]
"""Spends the evaluations of a replay."""


def random_search(replay: Replay) -> None:
    points = [*replay.space.times, *replay.space.invalid]
    replay.rng.shuffle(points)
    for point in points:
        replay.time(point)


def _near(replay: Replay, point: Values, values: list[list[object]]) -> list[Values]:
    found = [each for each in differ_in_one(point, values) if replay.knows(each)]
    replay.rng.shuffle(found)
    return found


def local_search(replay: Replay) -> None:
    """Greedy: from a random point to the first neighbour that is quicker; where there is none, from a point nearby that is drawn."""
    values = list(replay.space.parameters.values())
    points = [*replay.space.times, *replay.space.invalid]
    best = replay.rng.choice(points)
    replay.time(best)
    while len(replay.seen) < len(points):
        point = _kicked(replay, best, values) if len(replay.seen) > 1 else best
        replay.time(point)
        moved = True
        while moved:
            moved = False
            for each in _near(replay, point, values):
                if replay.time(each) < replay.time(point):
                    point, moved = each, True
                    break
        if replay.time(point) <= replay.time(best):
            best = point
        elif replay.rng.random() < 0.05:
            best = replay.rng.choice(points)


def _kicked(replay: Replay, point: Values, values: list[list[object]]) -> Values:
    for _ in range(20):
        changed = list(point)
        for i in replay.rng.sample(range(len(point)), min(KICK, len(point))):
            changed[i] = replay.rng.choice(values[i])
        if replay.knows(tuple(changed)) and tuple(changed) != point:
            return tuple(changed)
    return replay.rng.choice([*replay.space.times, *replay.space.invalid])


def annealing(replay: Replay) -> None:
    values = list(replay.space.parameters.values())
    points = [*replay.space.times, *replay.space.invalid]
    point, heat, stuck = replay.rng.choice(points), HOT, 0
    while len(replay.seen) < len(points):
        near = _near(replay, point, values)
        each = near[0] if near and stuck < 2 * len(near) else replay.rng.choice(points)
        stuck = 0 if each not in replay.seen else stuck + 1
        here, there = replay.time(point), replay.time(each)
        loss = there / here - 1 if math.isfinite(here) and math.isfinite(there) else (-1.0 if math.isfinite(there) else math.inf)
        if loss <= 0 or replay.rng.random() < math.exp(-loss / heat):
            point = each
        heat = max(1e-3, heat * COOL)


class _Recorded:
    """The space as a search's trial (vkback/autotune/search.py)."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def compile(self, points: Iterable[Values]) -> None:
        """Nothing: it is recorded."""

    def wrong(self, point: Values) -> str:
        return "" if math.isfinite(self._replay.time(point)) else "recorded so"

    def measure(self, point: Values, repetitions: int) -> Measurement:
        return Measurement(self._replay.time(point), self._replay.space.times[point][1])


def ours(replay: Replay) -> None:
    """The search of `vkback tune`, as it is, from what the tables say and from points that won elsewhere; where a space has no starts, from
    one at random."""
    space = replay.space
    starts = [point for point in space.starts if point in space.times] or [replay.rng.choice(list(space.times))]
    search: Search[Values] = Search(
        _Recorded(replay),
        lambda point: "" if replay.knows(point) else "not recorded",
        lambda point, said: None,
        time.monotonic() + 3600,
        False,
    )
    search.begin(starts, starts[0], "the first start")
    search.hill_climb(space.neighbours)


STRATEGIES: dict[str, Strategy] = {
    "random search": random_search,
    "iterated local search": local_search,
    "annealing": annealing,
    "ours": ours,
}


@dataclass(frozen=True)
class Found:
    """What a strategy found in all its runs, by the median.

    needed  evaluations until a point within each share of WITHIN was seen; None where fewer than half of the runs found one
    best    optimum's time over that of the best point after each of MARKS, and at the end
    spent   evaluations at the end
    """

    strategy: str
    needed: tuple[float | None, ...]
    best: tuple[float, ...]
    spent: float


def simulate(space: Space, *, runs: int = RUNS, limit: int | None = None, seed: int = 0) -> list[Found]:
    """Replay each strategy `runs` times. limit: evaluations of a run, LIMIT unless given. Raises SweepError for a space
    without times."""
    if not space.times:
        raise SweepError(f"[tune] {space.line or space.family}: no point has a time; expected a recorded space")
    most = min(limit or LIMIT, len(space.times) + len(space.invalid))
    return [_found(name, space, [_run(strategy, space, most, seed + i) for i in range(runs)]) for name, strategy in STRATEGIES.items()]


def _run(strategy: Strategy, space: Space, limit: int, seed: int) -> list[float]:
    """The time of the best point seen, after each evaluation."""
    replay = Replay(space, random.Random(seed), limit)
    with suppress(_Spent):
        strategy(replay)
    return list(accumulate(replay.seen.values(), min))


def _found(name: str, space: Space, runs: list[list[float]]) -> Found:
    optimum = space.optimum
    needed: list[float | None] = []
    for share in WITHIN:
        first = [next((i for i, us in enumerate(run, 1) if us <= (1 + share) * optimum), math.inf) for run in runs]
        middle = median(first)
        needed.append(middle if math.isfinite(middle) else None)
    best = [median(optimum / run[min(mark, len(run)) - 1] for run in runs) for mark in MARKS]
    best.append(median(optimum / run[-1] for run in runs))
    return Found(name, tuple(needed), tuple(best), median(len(run) for run in runs))

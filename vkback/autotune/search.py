"""The search of a sweep: hill climbing, and the duel at its end.

Hill climbing goes from a few points to the best neighbour of the best point, for as long as one is better. The duel then says which
challenger beats the incumbent beyond the noise of the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vkback.device.errors import DeviceLost
from vkback.errors import VkbackError
from vkback.timing.launches import Measurement, summarize

RELATIVE_NOISE = 0.01
"""Relative differences below this are noise whatever the spread says: clocks and memory refresh move medians by about as much."""

DUEL_ROUNDS = 5
"""Measurements of each point in a duel. Of two equal points one wins all rounds once in 32."""

P = TypeVar("P")
"""A point: a setting of what is tuned."""

P_contra = TypeVar("P_contra", contravariant=True)


class SweepError(VkbackError):
    """A sweep that cannot go on, with what to do."""


class Timed(Protocol[P_contra]):
    """What a duel needs of a trial."""

    def measure(self, point: P_contra, repetitions: int) -> Measurement:
        """The time that points are compared by."""


class Tried(Timed[P_contra], Protocol[P_contra]):
    """What a search needs of a trial."""

    def compile(self, points: Iterable[P_contra]) -> None:
        """Compile the kernels of points into the device's cache, for `wrong` and `measure` to find them there."""

    def wrong(self, point: P_contra) -> str:
        """What is wrong with a point's result; "" when it is right."""


@dataclass
class Search(Generic[P]):
    """A search under way, and what it has found.

    refusal   why a point is not worth compiling; "" when it is
    told      called with every point and what became of it
    deadline  in seconds of time.monotonic(); the first points are tried in any case
    software  the device is the CPU: it compiles few points at a time, and none while others are timed
    trying    context around the trial of a point; an exception that leaves it ends the search
    found     called with every point that is right, and its time
    measured  points with right results; refused and wrong: the others, and why
    """

    trial: Tried[P]
    refusal: Callable[[P], str]
    told: Callable[[P, str], None]
    deadline: float
    software: bool
    trying: Callable[[P], AbstractContextManager[None]] = lambda point: nullcontext()
    found: Callable[[P, Measurement], None] = lambda point, measurement: None
    measured: dict[P, Measurement] = field(default_factory=dict)
    refused: dict[P, str] = field(default_factory=dict)
    wrong: dict[P, str] = field(default_factory=dict)

    def best(self, count: int) -> list[P]:
        """The quickest points, first the quickest."""
        return sorted(self.measured, key=lambda p: self.measured[p].us)[:count]

    def begin(self, points: Iterable[P], incumbent: P, about: str) -> None:
        """Try the first points. Raises SweepError where the incumbent, which `about` names, gives no right result."""
        self.attempt(points)
        if incumbent not in self.measured:
            raise SweepError(
                f"[tune] {about} gives no right result: {self.wrong.get(incumbent) or self.refused.get(incumbent)}. "
                "vkback doctor looks for the setting that cures it"
            )

    def hill_climb(self, neighbours: Callable[[P], Iterable[P]]) -> None:
        """From the best point to the best of its neighbours, until none is better or time is up."""
        best = self.best(1)[0]
        while time.monotonic() < self.deadline:
            self.attempt(neighbours(best))
            for point in self.best(4):
                self.measured[point] = self.trial.measure(point, 3)
            found = self.best(1)[0]
            if found == best:
                return
            best = found

    def attempt(self, points: Iterable[P]) -> None:
        """Compile, check and time what is not known yet."""
        good = [p for p in dict.fromkeys(points) if self._is_new(p)]
        size = 2 if self.software else 16
        batches = [good[i : i + size] for i in range(0, len(good), size)]
        with ThreadPoolExecutor(1) as pool:
            ready: Future[None] | None = pool.submit(self.trial.compile, batches[0]) if batches else None
            for i, batch in enumerate(batches):
                assert ready is not None
                with suppress(VkbackError):  # said again when the point is tried
                    ready.result()
                more = i + 1 < len(batches)
                if more and not self.software:
                    ready = pool.submit(self.trial.compile, batches[i + 1])
                for point in batch:
                    with self.trying(point):
                        self._try(point)
                if time.monotonic() > self.deadline and self.measured:
                    return
                if more and self.software:
                    ready = pool.submit(self.trial.compile, batches[i + 1])

    def _is_new(self, point: P) -> bool:
        if point in self.measured or point in self.refused or point in self.wrong:
            return False
        why = self.refusal(point)
        if why:
            self._refuse(point, why)
        return not why

    def _refuse(self, point: P, why: str) -> None:
        self.refused[point] = why
        self.told(point, f"refused: {why}")

    def _try(self, point: P) -> None:
        try:
            why = self.trial.wrong(point)
        except DeviceLost:
            raise
        except VkbackError as e:
            self._refuse(point, str(e))
            return
        if why:
            self.wrong[point] = why
            self.told(point, f"WRONG RESULT: {why}")
        else:
            self.measured[point] = self.trial.measure(point, 1)
            self.found(point, self.measured[point])
            self.told(point, f"{self.measured[point].us:.2f} us")


def beats(new: Measurement, old: Measurement, relative: float = RELATIVE_NOISE) -> bool:
    """Whether a time is shorter beyond the noise of both."""
    return bool(old.us - new.us > noise(new, old, relative))


def noise(a: Measurement, b: Measurement, relative: float = RELATIVE_NOISE) -> float:
    """Microseconds within which two measurements count as equal: from their spreads, and at least `relative` of the longer."""
    return max(2 * (a.spread_us + b.spread_us), relative * max(a.us, b.us))


def duel(trial: Timed[P], incumbent: P, challengers: Sequence[P], relative: float) -> tuple[P, dict[P, Measurement]]:
    """The winner, and everyone's measurement. Each challenger meets the winner so far, the incumbent first. Points are measured in turn. A
    challenger wins with a median better beyond the noise (`relative`, as in `noise`) and the better time in every round."""
    points = list(dict.fromkeys([incumbent, *challengers]))
    times: dict[P, list[float]] = {p: [] for p in points}
    for _ in range(DUEL_ROUNDS):
        for p in points:
            times[p].append(trial.measure(p, 2).us)
    measured = {p: summarize(t) for p, t in times.items()}
    best = incumbent
    for p in points[1:]:
        if beats(measured[p], measured[best], relative) and all(new < old for new, old in zip(times[p], times[best], strict=True)):
            best = p
    return best, measured

"""The search that sweeps share: from a few points to the neighbours of the best, for as long as one of them is better; and the duel at the
end, which says whether what was found beats what there was beyond the noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vkback.device.errors import DeviceLost
from vkback.errors import VkbackError
from vkback.timing.launches import Measurement, measurement_of

RELATIVE_NOISE = 0.01
"""Differences below this share are noise whatever the spread says: clocks and memory refresh move medians by about as much."""

DUEL_ROUNDS = 5
"""Of two equals one wins all of them once in 32."""

P = TypeVar("P")
"""A setting of what is tuned."""

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
        """Kernels of points, for what comes next to find them."""

    def wrong(self, point: P_contra) -> str:
        """What is wrong with a point's result; "" when it is right."""


@dataclass
class Search(Generic[P]):
    """A search under way: measured of points, what was refused and what was wrong.

    refusal   why a point is not worth compiling; "" when it is
    told      of every point and what became of it
    deadline  of time.monotonic(); the first points are tried in any case
    software  the device is the CPU: it compiles few points at a time, and none while others are timed
    trying    around the trial of a point; left by an exception only when nothing more can be tried
    """

    trial: Tried[P]
    refusal: Callable[[P], str]
    told: Callable[[P, str], None]
    deadline: float
    software: bool
    trying: Callable[[P], AbstractContextManager[None]] = lambda point: nullcontext()
    measured: dict[P, Measurement] = field(default_factory=dict)
    refused: dict[P, str] = field(default_factory=dict)
    wrong: dict[P, str] = field(default_factory=dict)

    def best(self, count: int) -> list[P]:
        return sorted(self.measured, key=lambda p: self.measured[p].us)[:count]

    def begin(self, points: Iterable[P], present: P, about: str) -> None:
        """Try the first points. Raises SweepError where the present one, of which `about` tells, is not among those that are right."""
        self.attempt(points)
        if present not in self.measured:
            raise SweepError(
                f"[tune] {about} gives no right result: {self.wrong.get(present) or self.refused.get(present)}. "
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
            self.told(point, f"{self.measured[point].us:.2f} us")


def beats(new: Measurement, old: Measurement, share: float = RELATIVE_NOISE) -> bool:
    """Whether a time is shorter beyond the noise of both."""
    return bool(old.us - new.us > noise(new, old, share))


def noise(a: Measurement, b: Measurement, share: float = RELATIVE_NOISE) -> float:
    return max(2 * (a.spread_us + b.spread_us), share * max(a.us, b.us))


def duel(trial: Timed[P], incumbent: P, challengers: Sequence[P], share: float) -> tuple[P, dict[P, Measurement]]:
    """Who is left when each challenger has met the best before it, the incumbent first; and everyone's time. All take turns, and to win
    takes a median better beyond the noise (at least `share` of the time) and the better time in every round."""
    points = list(dict.fromkeys([incumbent, *challengers]))
    times: dict[P, list[float]] = {p: [] for p in points}
    for _ in range(DUEL_ROUNDS):
        for p in points:
            times[p].append(trial.measure(p, 2).us)
    measured = {p: measurement_of(t) for p, t in times.items()}
    best = incumbent
    for p in points[1:]:
        if beats(measured[p], measured[best], share) and all(new < old for new, old in zip(times[p], times[best], strict=True)):
            best = p
    return best, measured

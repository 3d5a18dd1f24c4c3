"""Recorded spaces: all points of a task that a search can reach, and what became of each, to compare searches without a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from vkback.autotune.attention import Attention
from vkback.autotune.attention import axes as attention_axes
from vkback.autotune.attention import neighbours as attention_neighbours
from vkback.autotune.attention_prompts import PromptAttention
from vkback.autotune.attention_prompts import neighbours as prompt_neighbours
from vkback.autotune.delta_nets import DeltaNets
from vkback.autotune.delta_nets import neighbours as delta_neighbours
from vkback.autotune.gemm_points import neighbours as gemm_neighbours
from vkback.autotune.gemm_sweep import Gemms
from vkback.autotune.gemvs import Gemvs
from vkback.autotune.points import axes as gemv_axes
from vkback.autotune.points import neighbours as gemv_neighbours
from vkback.autotune.search import Search
from vkback.autotune.ssm_scans import SsmScans
from vkback.autotune.ssm_scans import neighbours as scan_neighbours
from vkback.autotune.tunable import J, RowMaker, S, Tunable
from vkback.device import Capabilities

Values = tuple[Any, ...]
"""A point: the values of its parameters."""

Invalidity = Literal["constraints", "compile", "runtime", "correctness"]
"""Why a point has no time, in the words of the T4 format. Points that are refused before they are compiled are not recorded."""

REPETITIONS = 3
"""Measurements of each point that is recorded."""


@dataclass(frozen=True)
class Family:
    """What searches of a family need without a device. maker: of its points and rows; neighbours: of a point, on a device."""

    maker: RowMaker[Any]
    neighbours: Callable[[Any, Capabilities], Iterable[Any]]


def _makers() -> dict[str, Family]:
    found = [
        Family(Gemvs, lambda point, caps: gemv_neighbours(point, gemv_axes(caps))),
        Family(Gemms, gemm_neighbours),
        Family(Attention, lambda point, caps: attention_neighbours(point, attention_axes(caps))),
        Family(PromptAttention, prompt_neighbours),
        Family(DeltaNets, lambda point, caps: delta_neighbours(point)),
        Family(SsmScans, lambda point, caps: scan_neighbours(point)),
    ]
    return {each.maker.journal: each for each in found}


TUNED = _makers()
"""By the journal's name."""


@dataclass
class Space:
    """A task's points on a device.

    family   the journal's name for it
    line     the task, in words
    names    of the parameters, in the order of a point's values
    starts   where our search begins; the first is what the tables choose
    times    points with right results: microseconds and their spread
    invalid  points that were tried and have none
    caps     of the device, which neighbours depend on; {} where they are not known
    """

    device: str
    driver: str
    kernels: str
    family: str
    line: str
    names: tuple[str, ...]
    starts: tuple[Values, ...] = ()
    times: dict[Values, tuple[float, float]] = field(default_factory=dict)
    invalid: dict[Values, Invalidity] = field(default_factory=dict)
    caps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, list[Any]]:
        """The values that each parameter has in any point, in order."""
        points = [*self.times, *self.invalid]
        return {name: sorted({point[i] for point in points}, key=_order) for i, name in enumerate(self.names)}

    @property
    def optimum(self) -> float:
        """The least time, in microseconds."""
        return min(us for us, _ in self.times.values())

    def neighbours(self, point: Values) -> list[Values]:
        """Points that our search goes to from a point; where the family or the device is not known, those that differ in one parameter."""
        known = TUNED.get(self.family)
        if known is not None and self.caps:
            caps = Capabilities.from_dict(self.caps)
            return [tuple(each) for each in known.neighbours(known.maker.point(point), caps)]
        return differ_in_one(point, list(self.parameters.values()))


def differ_in_one(point: Values, values: Sequence[Sequence[Any]]) -> list[Values]:
    return [(*point[:i], value, *point[i + 1 :]) for i, each in enumerate(values) for value in each if value != point[i]]


def _order(value: Any) -> tuple[str, Any]:
    return ("" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__, value)


def record(
    tunable: Tunable[J, S], task: J, space: Space, deadline: float, told: Callable[[Values], None], trying: Callable[[S], Any] | None = None
) -> bool:
    """Time all points that can be reached from the starts by neighbours and are not in the space yet. Whether all are there now.

    told      called with each point once it is in the space
    deadline  by time.monotonic()
    Raises SweepError where the present kernel gives no right result.
    """
    chosen = tunable.chosen(task)
    by_tables = (chosen.incumbent, chosen.present)

    def refusal(point: S) -> str:
        return tunable.refusal(task, point, chosen=point in by_tables)

    starts = tunable.starts(task)
    space.starts = tuple(tuple(point) for point in starts)
    with tunable.prepare(task)() as trial:
        search = Search(trial, refusal, lambda point, said: None, float("inf"), tunable.ctx.caps.software)
        seen: set[S] = set(starts)
        frontier = [point for point in seen if not refusal(point)]
        while frontier:
            fresh = [point for point in frontier if tuple(point) not in space.times and tuple(point) not in space.invalid]
            size = 2 if tunable.ctx.caps.software else 16
            for i in range(0, len(fresh), size):
                if time.monotonic() > deadline:
                    return False
                batch = fresh[i : i + size]
                search.attempt(batch)
                for point in batch:
                    at = tuple(point)
                    if point in search.measured:
                        measured = trial.measure(point, REPETITIONS)
                        space.times[at] = measured.us, measured.spread_us
                    else:
                        space.invalid[at] = "correctness" if point in search.wrong else "compile"
                    told(at)
            following = dict.fromkeys(n for point in frontier for n in tunable.neighbours(point) if n not in seen)
            seen.update(following)
            frontier = [point for point in following if not refusal(point)]
    return True


def invalidity(word: str) -> Invalidity:
    return cast(Invalidity, word if word in ("constraints", "compile", "runtime", "correctness") else "runtime")

"""Two profiles side by side: which kernel got slower. A kernel is that of all layers together, in one phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vkback.errors import VkbackError


class ProfileFormatError(VkbackError):
    """Values that no `vkback profile --json` wrote."""


@dataclass(frozen=True)
class Changed:
    """A kernel of a phase: microseconds a run of each profile before and after; empty where it is not there.

    apart  all of one side are above all of the other; None where there are too few to say so
    """

    phase: str
    kernel: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    apart: bool | None

    @property
    def ratio(self) -> float:
        """The medians, after over before; infinite for a new kernel, 0 for one that is gone."""
        return median(self.after or (0.0,)) / median(self.before) if self.before and median(self.before) > 0 else math.inf


MIN_PROFILES = 3
"""Profiles of each side from which on `apart` says something: of 3 and 3 equal ones all of a side are above in 1 of 10 kernels, of 5 and 5
in 1 of 126."""


def kernels(profile: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Microseconds a run by phase and kernel. Raises ProfileFormatError."""
    try:
        found: dict[tuple[str, str], float] = {}
        for phase in profile["phases"]:
            for k in phase["kernels"]:
                name = k["name"].rpartition(":L")[0] or k["name"]
                key = (str(phase["name"]), name)
                found[key] = found.get(key, 0.0) + k["gpu_us"] / k["runs"]
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise ProfileFormatError(f"expected what vkback profile --json writes: {e!r}") from e
    return found


def compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[Changed]:
    """Every kernel, those with the largest difference in time first."""
    sides = [[kernels(each) for each in side] for side in (before, after)]
    found = []
    for key in dict.fromkeys(key for side in sides for each in side for key in each):
        first, second = (tuple(each[key] for each in side if key in each) for side in sides)
        enough = min(len(first), len(second)) >= MIN_PROFILES
        apart = (max(first) < min(second) or max(second) < min(first)) if enough else None
        found.append(Changed(*key, first, second, apart))
    return sorted(found, key=lambda c: -abs(median(c.after or (0.0,)) - median(c.before or (0.0,))))


def text(found: Sequence[Changed], names: tuple[str, str], everything: bool = False) -> Iterator[str]:
    """A table of each phase; kernels that differ first, and what the verdicts mean."""
    width = 40
    for phase in dict.fromkeys(c.phase for c in found):
        own = [c for c in found if c.phase == phase]
        totals = [sum(median(side) for c in own if (side := getattr(c, name))) for name in ("before", "after")]
        yield f"{phase}: microseconds a run, {names[0]} and {names[1]}"
        yield f"{'kernel of all layers':{width}} {'before':>10} {'after':>10} {'change':>8} slower?"
        for c in own if everything else own[:12]:
            cells = [f"{median(side):.2f}" if side else "none" for side in (c.before, c.after)]
            change = f"{100 * (c.ratio - 1):+.1f}%" if c.before and c.after else ""
            name = c.kernel if len(c.kernel) <= width else f"{c.kernel[: width - 1]}~"
            yield f"{name:{width}} {cells[0]:>10} {cells[1]:>10} {change:>8} {verdict(c)}".rstrip()
        if len(own) > 12 and not everything:
            yield f"{len(own) - 12} others"
        change = f"{100 * (totals[1] / totals[0] - 1):+.1f}%" if totals[0] else ""
        yield f"{'TOTAL':{width}} {totals[0]:>10.2f} {totals[1]:>10.2f} {change:>8}"
        yield ""
    runs = min((min(len(c.before), len(c.after)) for c in found if c.before and c.after), default=0)
    if runs >= MIN_PROFILES:
        chance = 2 / math.comb(2 * runs, runs)
        yield f"{runs} profiles of each side, in turn. slower, faster: all of one side are beyond all of the other, which equal sides do in"
        yield f"{100 * chance:.2g} of 100 kernels."
    else:
        yield "One profile of each side knows nothing of load and clocks that changed between them: take --against with a build."


def verdict(c: Changed) -> str:
    """In a word."""
    if not c.before or not c.after:
        return "new" if c.after else "gone"
    if c.apart is None:
        return "?"
    return ("slower" if c.ratio > 1 else "faster") if c.apart else "no"


def as_data(found: Sequence[Changed]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [
        {"phase": c.phase, "kernel": c.kernel, "before_us": list(c.before), "after_us": list(c.after), "verdict": verdict(c)} for c in found
    ]

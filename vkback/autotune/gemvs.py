"""What the two sweeps of the GEMV family have in common: points, what the tables say, and rows for the device's own table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from vkback import quants
from vkback.autotune.gemv_rows import gemv_rows
from vkback.autotune.points import Point, Task, actual, axes, neighbours, refusal
from vkback.autotune.search import RELATIVE_NOISE
from vkback.autotune.tunable import Chosen, TuneResult
from vkback.ops.family import Chooser
from vkback.ops.lowering import LowerContext, PlanError
from vkback.paths import tuning_root
from vkback.tuning.lookup import Tuning
from vkback.tuning.row import Row


class Gemvs(ABC):
    """The part of a `Tunable` that is the same however a GEMV is timed. The incumbent is what the tables that come with vkback say."""

    journal = "gemv"
    families = ("gemv", "gemv_path")
    relative_noise = RELATIVE_NOISE

    def __init__(self, ctx: LowerContext) -> None:
        self.ctx = ctx

    @classmethod
    def point(cls, values: Iterable[Any]) -> Point:
        return Point(*values)

    def chosen(self, task: Task) -> Chosen[Point]:
        shipped, source = self.picked(task, Tuning.for_device(self.ctx.caps, tuning_root()))
        return Chosen(shipped, source, self.picked(task, self.ctx.tuning)[0])

    def picked(self, task: Task, tables: Chooser) -> tuple[Point, str]:
        """The point that tables lead to, and the row it comes from."""
        choice = tables.pick("gemv", **task.match, decoder=quants.quant(task.problem.quant).decoder, **task.sizes)
        return actual(Point(**choice.params), task, task.context(self.ctx)), choice.source

    def starts(self, task: Task) -> list[Point]:
        chosen = self.chosen(task)
        out = []
        # Guesses are about threads and loads: how weights are decoded, the tables know of the type.
        decoding = {name: getattr(chosen.incumbent, name) for name in ("scales", "pairs_in_shared")}
        guessed = (point._replace(**decoding) for point in self.guesses(task, chosen.incumbent))
        for point in (chosen.incumbent, chosen.present, *guessed):
            with suppress(PlanError):
                out.append(actual(point, task, task.context(self.ctx)))
        return list(dict.fromkeys(out))

    @abstractmethod
    def guesses(self, task: Task, shipped: Point) -> list[Point]:
        """Points that a search begins at beside those of the tables. shipped: the incumbent."""

    def neighbours(self, point: Point) -> Iterator[Point]:
        return neighbours(point, axes(self.ctx.caps))

    def refusal(self, task: Task, point: Point, *, chosen: bool) -> str:
        return refusal(point, task, task.context(self.ctx), chosen=chosen)

    @classmethod
    def rows(cls, results: Sequence[TuneResult[Point]], present: Sequence[Row], card: str) -> list[list[str]]:
        """From the journal alone: the range of a row depends on the sizes measured beside its own."""
        return gemv_rows(results, card)

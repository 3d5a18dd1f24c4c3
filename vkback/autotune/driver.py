"""The driver of all sweeps: for each task a search, a duel with the incumbent, a line in the journal and rows in the device's table.

The search (vkback/autotune/search.py) begins at what the tables say and at points that have won elsewhere. It then changes one parameter
of the best point at a time, and some pairs, until nothing is better or the task's part of the budget is spent. Every point's result is
checked before it is timed. A tunable (vkback/autotune/tunable.py) says what is searched and what a point costs.

Results go into a journal beside the device's table, a line an event, so that a run that was cut short can go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, Generic

from vkback.autotune.device_table import DeviceTable
from vkback.autotune.journal import Notes
from vkback.autotune.search import Search, SweepError, duel, noise
from vkback.autotune.tunable import J, S, Trial, Tunable, TuneResult
from vkback.timing.launches import Measurement


@dataclass
class Watcher:
    """What a sweep tells while it runs; the command draws a progress bar from it.

    begin  a task, its number from 0, and how many there are
    point  a task, a point of it, and what became of the point
    end    a task's result
    fault  why a task could not be tuned
    """

    begin: Callable[[Any, int, int], None] = lambda task, number, total: None
    point: Callable[[Any, Any, str], None] = lambda task, point, said: None
    end: Callable[[TuneResult[Any]], None] = lambda result: None
    fault: Callable[[str], None] = lambda text: None


class Sweep(Generic[J, S]):
    """Tunes tasks on a device and keeps its table.

    read_rate  of the device, GB/s
    budget_s   seconds for all tasks; each gets an equal part of what is left
    """

    def __init__(
        self, tunable: Tunable[J, S], own: DeviceTable, read_rate: float, *, budget_s: float, watcher: Watcher | None = None
    ) -> None:
        self.tunable, self.own, self.read_rate, self.budget_s = tunable, own, read_rate, budget_s
        self.watcher = watcher or Watcher()
        self.faults: list[str] = []

    @property
    def results(self) -> list[TuneResult[S]]:
        """All that the journal has of the tunable."""
        return self.own.results(self.tunable.journal, self.tunable.point)

    def run(self, tasks: Sequence[J], *, resume: bool = False) -> list[TuneResult[S]]:
        """Tune each task and write the table after each, until the budget is spent; the first is done in any case. A task whose present
        kernel is wrong is left with a text in `faults`.

        resume  pass over the tasks that the journal has a result for, and the points of others that it has a time for
        """
        todo = [j for j in tasks if not (resume and self.own.journal.finished(j.key))]
        if not resume:
            for task in todo:
                self.own.journal.forget(task.key)
        if not todo:
            return []
        with self.tunable.opened():
            return self._run(todo)

    def _run(self, todo: Sequence[J]) -> list[TuneResult[S]]:
        start = time.monotonic()
        software = self.tunable.ctx.caps.software  # a CPU driver needs the cores itself while points are timed
        results: list[TuneResult[S]] = []
        with ThreadPoolExecutor(1) as ahead:
            next_one = ahead.submit(self.tunable.prepare, todo[0])
            for i, task in enumerate(todo):
                left = self.budget_s - (time.monotonic() - start)
                if left <= 0 and i:
                    next_one.cancel()
                    break
                self.watcher.begin(task, i, len(todo))
                open_trial = next_one.result()
                more = i + 1 < len(todo)
                if more and not software:
                    next_one = ahead.submit(self.tunable.prepare, todo[i + 1])
                results += self._finish(task, open_trial, time.monotonic() + left / (len(todo) - i))
                if more and software:
                    next_one = ahead.submit(self.tunable.prepare, todo[i + 1])
        return results

    def _finish(self, task: J, open_trial: Callable[[], Trial[S]], deadline: float) -> list[TuneResult[S]]:
        """Tune a task and keep its result; nothing where its present kernel is wrong."""
        try:
            result = self._tune(task, open_trial, deadline)
        except SweepError as e:
            self.faults.append(str(e))
            self.watcher.fault(str(e))
            return []
        self.own.keep(self.tunable, result)
        self.tunable.learn(self.own.tables())
        self.watcher.end(result)
        return [result]

    def _tune(self, task: J, open_trial: Callable[[], Trial[S]], deadline: float) -> TuneResult[S]:
        return tune_task(self.tunable, task, open_trial, deadline, self.own.journal, self.read_rate, partial(self.watcher.point, task))


def tune_task(
    tunable: Tunable[J, S],
    task: J,
    open_trial: Callable[[], Trial[S]],
    deadline: float,
    notes: Notes,
    read_rate: float,
    told: Callable[[S, str], None],
) -> TuneResult[S]:
    """Search and duel for one task.

    open_trial  of `tunable.prepare`
    deadline    of the search, in seconds of time.monotonic()
    notes       what is known of its points already, and where new ones go
    read_rate   of the device, GB/s
    told        called with every point and what became of it
    Raises SweepError where the present kernel gives no right result.
    """
    share = tunable.relative_noise
    chosen = tunable.chosen(task)
    before, present = chosen.incumbent, chosen.present

    def refusal(point: S) -> str:
        by_tables = point in (before, present)
        return tunable.refusal(task, point, chosen=by_tables) or notes.refusal(task.key, point)

    with open_trial() as trial:
        search = Search(
            trial,
            refusal,
            told,
            deadline,
            tunable.ctx.caps.software,
            partial(notes.trying, task.key),
            lambda point, m: notes.measured(task.key, point, m.us, m.spread_us),
            {tunable.point(at): Measurement(*known) for at, known in notes.known(task.key).items()},
        )
        # Start from what the tables choose and from points that won elsewhere, then search their neighbours.
        search.begin(tunable.starts(task), before, f"{task.line}: the kernel that the tables choose ({chosen.source}: {before.text})")
        search.hill_climb(tunable.neighbours)
        # The search measures each point briefly; a duel with more repetitions decides.
        challengers = [p for p in (present, *search.best(2)) if p in search.measured]
        after, measured = duel(trial, before, challengers, share)
        # Latency decides; throughput is measured of the two finalists alone, for the report.
        throughput = {p: trial.throughput(p) for p in dict.fromkeys((before, after))}
        nbytes = trial.nbytes(after)
        timed = {**search.measured, **measured}  # the duel's figures are of more repetitions
    return TuneResult(
        key=task.key,
        line=task.line,
        match=task.match,
        sizes=task.sizes,
        before=before,
        source=chosen.source,
        latency_before=measured[before].us,
        throughput_before=throughput[before],
        after=after,
        latency=measured[after].us,
        throughput=throughput[after],
        noise=noise(measured[after], measured[before], share),
        nbytes=nbytes,
        read_rate=read_rate,
        tried=len(search.measured),
        refused=len(search.refused),
        date=date.today().isoformat(),
        wrong=tuple(f"{p.text}: {why}" for p, why in search.wrong.items()),
        timed=tuple((tuple(p), m.us, m.spread_us) for p, m in timed.items()),
    )

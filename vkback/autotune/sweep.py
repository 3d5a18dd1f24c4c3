"""Sweeps of the mat-vec family's tuning parameters on one device: what `vkback tune` does.

The search for a job's best point (vkback/harness/climb.py) begins at what the tables say and at a few shapes that have won elsewhere, then
changes one parameter of the best point at a time (and some pairs), until nothing is better or its share of the budget is spent. The result
of every point is checked against the reference before it is timed. The measure is the time of a launch that waits for the one before
(here), or that of a token (vkback/harness/in_program.py): what a token pays.

What is found goes into a journal beside the device's table, a line an event, so that a run that was cut short can go on; the table is made
from the journal alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.autotune.own_table import OwnTable, TuneResult
from vkback.autotune.points import Job, Point, actual, axes, compile_points, lowered, neighbours, refusal
from vkback.autotune.problem import MatVecProblem
from vkback.autotune.search import RELATIVE_NOISE, Search, SweepError, Tried, duel, noise
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.harness.judge import judge
from vkback.ops.base import OPS, Array, Chooser, LowerContext, PlanError, Problem
from vkback.paths import tuning_root
from vkback.plan.tuning import Tuning
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Bench, Measurement

CHECKED_WEIGHTS = 64 << 20
"""Weights beyond which the reference is computed for a part of the rows only; decoding takes about a second for 30 million."""

REFERENCE_ROWS = 2048

WARM_S = 0.005
"""Before each lap of a search: the GPU has been busy all along."""

STARTS = (
    Point(64, 64, 2, 2, 0, 0, 0, 0),
    Point(64, 32, 2, 4, 0, 0, 0, 0),
    Point(512, 64, 1, 1, 0, 0, 0, 0),
    Point(256, 32, 2, 2, 0, 0, 0, 0),
    Point(512, 16, 4, 1, 0, 0, 0, 0),
    Point(512, 32, 4, 2, 0, 0, 0, 0),
    Point(128, 64, 2, 1, 0, 0, 0, 0),
    Point(8, 8, 1, 1, 0, 0, 0, 0),
    Point(32, 8, 4, 1, 0, 0, 0, 0),
)
"""Shapes that have won somewhere: one subgroup a row, many rows a workgroup, half a workgroup a row."""


@dataclass(frozen=True)
class Expected:
    """The reference's output for some rows: `columns` of the output's last axis and their values, float64."""

    columns: npt.NDArray[np.intp]
    values: Array


def expected(problem: Problem, product: MatVecProblem) -> Expected:
    """The reference, block of rows by block; of a product with more than CHECKED_WEIGHTS weights the first, the last and two others."""
    node = problem.node
    by = dict(zip(node.params["roles"], node.inputs, strict=True))
    values = {role: problem.values[t.name] for role, t in by.items()}
    if by["x"].type == "Q8_1":
        values["x"] = quants.q8_1_dequantize(values["x"].reshape(-1, quants.q8_1_stride(product.k)), product.k).reshape(by["x"].shape)
    raw = values["w"].reshape(-1, product.m, values["w"].shape[-1])
    if product.ids:
        chosen, ids = np.unique(values["ids"], return_inverse=True)
        raw, values["ids"] = raw[chosen], ids.reshape(values["ids"].shape)
    starts = list(range(0, product.m, REFERENCE_ROWS))
    if raw.shape[0] * product.m * product.k > CHECKED_WEIGHTS:
        starts = sorted({0, starts[len(starts) // 3], starts[2 * len(starts) // 3], starts[-1]})
    columns, parts = [], []
    for first in starts:
        last = min(first + REFERENCE_ROWS, product.m)
        rows, outs = slice(first, last), slice(first >> product.glu, last >> product.glu)
        w = quants.decode(product.quant, raw[:, rows].reshape(-1, raw.shape[-1])).reshape(raw.shape[0], last - first, product.k)
        cut = {**values, "w": w if product.ids else w[0]}
        if "bias" in cut:
            experts = chosen if product.ids else np.zeros(1, np.intp)
            cut["bias"] = cut["bias"].reshape(-1, product.m)[experts, rows].ravel()
        if "residual" in cut:
            cut["residual"] = cut["residual"][..., outs]
        (out,) = OPS["MAT_VEC"].reference([cut[role] for role in node.params["roles"]], node.params)
        columns.append(np.arange(outs.start, outs.stop))
        parts.append(out)
    return Expected(np.concatenate(columns), np.concatenate(parts, axis=-1))


def wrong(bench: Bench, job: Job, ctx: LowerContext, want: Expected) -> str:
    """What is wrong with the result of the kernel that `ctx` leads to; "" when it is right."""
    node = bench.problem.node
    got = bench.outputs(ctx)[node.outputs[0].name]
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite"
    verdict = judge(got[..., want.columns], want.values, OPS["MAT_VEC"].tolerance(node, ctx))
    return "" if verdict.ok else verdict.text


@dataclass
class Watcher:
    """What a sweep tells while it runs; the command draws a progress bar from it."""

    begin: Callable[[Job, int, int], None] = lambda job, number, total: None
    point: Callable[[Job, Point, str], None] = lambda job, point, said: None
    end: Callable[[TuneResult], None] = lambda result: None


class Trial(Tried[Point], Protocol):
    """A job on the device, ready for points to be tried, as long as the block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def throughput(self, point: Point) -> float:
        """Microseconds without waiting."""

    def nbytes(self, point: Point) -> int:
        """Bytes that are read in that time."""


class ChainTrial:
    """A job in launches that each wait for the one before."""

    def __init__(self, bench: Bench, job: Job, ctx: LowerContext, want: Expected) -> None:
        self._bench, self._job, self._ctx, self._want = bench, job, ctx, want

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bench.__exit__()

    def compile(self, points: Iterable[Point]) -> None:
        compile_points(self._bench.device, self._bench.library, points, self._job, self._ctx)

    def wrong(self, point: Point) -> str:
        return wrong(self._bench, self._job, self._job.context(self._ctx, point), self._want)

    def measure(self, point: Point, repetitions: int) -> Measurement:
        return self._bench.measure(self._job.context(self._ctx, point), chained=True, repetitions=repetitions, warm_s=WARM_S)

    def throughput(self, point: Point) -> float:
        return self._bench.measure(self._job.context(self._ctx, point), chained=False, warm_s=WARM_S).us

    def nbytes(self, point: Point) -> int:
        return sum(d.nbytes for d in lowered(point, self._job, self._ctx))


class Sweep:
    """Tunes jobs on a device and keeps its table.

    folder   of the device's table and journal, the user's own
    budget_s seconds for all jobs; each gets an equal share of what is left
    """

    relative_noise: ClassVar[float] = RELATIVE_NOISE

    def __init__(
        self, device: Device, library: ShaderLibrary, folder: Path, read_rate: float, *, budget_s: float, cold_bytes: int | None = None,
        watcher: Watcher | None = None, driver: str = "",
    ) -> None:  # fmt: skip
        self.device, self.library, self.read_rate = device, library, read_rate
        self.own = OwnTable(device, library, folder, driver)
        self.ctx = LowerContext(device.caps, self.own.tables())
        self.budget_s = budget_s
        self.cold_bytes = cold_bytes if cold_bytes is not None else (16 << 20 if device.caps.software else 512 << 20)
        self.watcher = watcher or Watcher()
        self.faults: list[str] = []

    def run(self, jobs: Sequence[Job], *, resume: bool = False) -> list[TuneResult]:
        """Tune each job and write the table after each, until the budget is spent; the first is done in any case. A job whose present
        kernel is wrong is left with a text in `faults`.

        resume  pass over the jobs that the journal has a result for
        """
        start = time.monotonic()
        todo = [j for j in jobs if not (resume and self.own.journal.finished(j.key))]
        results: list[TuneResult] = []
        with ThreadPoolExecutor(1) as ahead:
            next_one = ahead.submit(self._prepare, todo[0]) if todo else None
            for i, job in enumerate(todo):
                assert next_one is not None
                left = self.budget_s - (time.monotonic() - start)
                if left <= 0 and i:
                    next_one.cancel()
                    break
                self.watcher.begin(job, i, len(todo))
                opened = next_one.result()
                next_one = ahead.submit(self._prepare, todo[i + 1]) if i + 1 < len(todo) and not self.device.caps.software else None
                try:
                    result = self._tune(job, opened, time.monotonic() + left / (len(todo) - i))
                except SweepError as e:
                    self.faults.append(str(e))
                else:
                    self._keep(result)
                    results.append(result)
                    self.watcher.end(result)
                if next_one is None and i + 1 < len(todo):
                    next_one = ahead.submit(self._prepare, todo[i + 1])
        return results

    def _keep(self, result: TuneResult) -> None:
        self.own.keep(result)

    def _prepare(self, job: Job) -> Callable[[], Trial]:
        """What a job needs beside the device's memory; then its trial is opened."""
        problem = job.product.problem()
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, self._starts(job), job, self.ctx)
        want = expected(problem, job.product)

        def opened() -> Trial:
            bench = Bench(self.device, self.library, problem, job.context(self.ctx), cold_bytes=self.cold_bytes)
            return ChainTrial(bench, job, self.ctx, want)

        return opened

    def _said(self, job: Job, tuning: Chooser) -> tuple[Point, str]:
        """The point that tables lead to, and the row it comes from."""
        p = job.product
        choice = tuning.pick("mat_vec", **job.match, m=p.m, k=p.k)
        return actual(Point(**{k: choice[k] for k in Point._fields}), job, job.context(self.ctx)), choice.source

    def _starts(self, job: Job) -> list[Point]:
        shipped = Tuning.for_device(self.device.caps, tuning_root())
        points = [self._said(job, shipped)[0], self._said(job, self.ctx.tuning)[0]]
        points += self._guesses(job, points[0])
        out = []
        for point in points:
            try:
                out.append(actual(point, job, job.context(self.ctx)))
            except PlanError:
                continue
        return list(dict.fromkeys(out))

    def _guesses(self, job: Job, shipped: Point) -> list[Point]:
        """Points that a search begins at beside those of the tables."""
        cores = self.device.caps.shader_cores or 64
        many = [] if self.device.caps.software else [shipped._replace(groups=4 * cores)]
        return [start for start in STARTS if self.device.caps.software == (start.wg < 64)] + many

    def _tune(self, job: Job, opened: Callable[[], Trial], deadline: float) -> TuneResult:
        shipped = Tuning.for_device(self.device.caps, tuning_root())
        before, source = self._said(job, shipped)
        present, _ = self._said(job, self.ctx.tuning)
        with opened() as trial:
            climb = Search(
                trial, partial(self._refusal, job, {before, present}), partial(self.watcher.point, job), deadline,
                self.device.caps.software, partial(self.own.journal.trying, job.key),
            )  # fmt: skip
            trial.measure(before, 1)
            climb.begin(self._starts(job), before, f"{job.line}: the kernel that the tables choose ({source}: {before.text})")
            choices = axes(self.device.caps)
            climb.hill_climb(lambda point: neighbours(point, choices))
            challengers = [p for p in (present, *climb.best(2)) if p in climb.measured]
            after, measured = duel(trial, before, challengers, self.relative_noise)
            through = {p: trial.throughput(p) for p in dict.fromkeys((before, after))}
            nbytes = trial.nbytes(after)
        return TuneResult(
            key=job.key, line=job.line, match=job.match, m=job.product.m, k=job.product.k, before=before, source=source,
            latency_before=measured[before].us, throughput_before=through[before], after=after, latency=measured[after].us,
            throughput=through[after], noise=noise(measured[after], measured[before], self.relative_noise), nbytes=nbytes,
            read_rate=self.read_rate, tried=len(climb.measured), refused=len(climb.refused), date=date.today().isoformat(),
            wrong=tuple(f"{p.text}: {why}" for p, why in climb.wrong.items()),
        )  # fmt: skip

    def _refusal(self, job: Job, chosen: Container[Point], point: Point) -> str:
        return refusal(point, job, job.context(self.ctx), chosen=point in chosen) or self.own.journal.refusal(job.key, point)

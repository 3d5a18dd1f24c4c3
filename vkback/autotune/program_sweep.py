"""Sweeps of products inside the program of a model's token, where stages hand over without barriers (vkback/plan/sync.py).

A stage of such a program starts while the one before it still runs, so its best shape differs from that of a chain of launches with
barriers: larger workgroups, with all their weights in flight while they wait. Each point is therefore planned into the token's schedule in
the place of the product's present one, and what counts is the time of a token. A point is right where the first result of its kernel and
the logits of a token are those of the present program and no wait was given up. Rows found so say `sync = "sentinel"`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Generic, Self

import numpy as np

from vkback.autotune.own_table import TuneResult
from vkback.autotune.points import Job, Point
from vkback.autotune.search import P, SweepError
from vkback.autotune.sweep import WARM_S, Sweep, Trial
from vkback.graph import Tensor
from vkback.harness.judge import Verdict, judge
from vkback.models.registry import Model
from vkback.ops.base import Chooser, Dispatch, LowerContext, PlanError, Tolerance
from vkback.ops.mat_vec import product_tolerance
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.plan.tuning import Overrides
from vkback.program import compile_kernels
from vkback.timing.launches import Measurement, measurement_of, warm_up
from vkback.timing.token_program import TokenProgram, Tokens

TOKEN_NOISE = 0.001
"""Differences of a token's time below this share are noise. A product is a small part of a token: the best shape of one that takes a tenth
of it seldom saves more than a hundredth, which a chain's sweep would call noise."""

LOGITS_TOLERANCE = Tolerance(
    5e-3, 1.0, "sums in another order round otherwise to Q8_1 now and then, and layers pass that on: NMSE 2.5e-4 seen after 24 layers. One "
    "wrong row of 2048 in each of 24 layers is an NMSE of 1e-2"
)  # fmt: skip

CHECKED_TOKENS = (0, 37, 101)
"""Tokens whose logits are compared, of which most must agree: a wrong kernel is wrong for every token. Where two experts are all but
equally likely, another order of additions chooses the other, and logits are others (NMSE up to 3.1e-2 seen in gpt-oss). Such a token counts
as one that agrees; there the first result of the changed kernel speaks."""

FIRST_TOLERANCE = product_tolerance(q8_in=True, q8_out=True, glu=True)
"""Of the first tensor that a changed kernel makes, from inputs of the same bits: the widest bound of any product."""

RUNS = 3
"""How often a lap runs a recording, for each repetition asked for."""

KEPT_PROGRAMS = 8
"""As many as a duel or a second look at the best takes turns with."""

WAITING_STARTS = ((1024, 64, 2, 1), (1024, 64, 2, 2), (1024, 32, 1, 4), (1024, 32, 2, 2), (1024, 128, 4, 1), (1024, 128, 4, 2),
                  (512, 64, 4, 2), (512, 32, 2, 4))  # fmt: skip
"""Threads, lanes, rows and unroll that have won where x is copied as it is: a whole tile's weights are asked for before x is there."""

PROLOGUE_STARTS = tuple((wg, lanes, rows, 1) for wg, lanes, rows in itertools.product((1024, 512), (16, 32, 64, 8), (2, 4, 1)))
"""The same where every workgroup works x out by itself, or rounds its results to Q8_1."""


def replaced(tables: Chooser, job: Job, point: Point) -> Overrides:
    """Tables that answer for one job with a point of its own."""
    return Overrides(tables, {"mat_vec": point._asdict()}, "sweep", {**job.match, "m": job.product.m, "k": job.product.k})


def first_changed(present: Schedule, other: Schedule) -> Tensor | None:
    """The first tensor that a kernel of another schedule makes and none of the present one, where both keep it to the end. All that was
    made before it has the same bits in both. None: there is no such tensor."""
    kernels = {(d.label, d.kernel, d.groups) for d in present.dispatches()}
    changed = next((d for d in other.dispatches() if (d.label, d.kernel, d.groups) not in kernels), None)
    kept = present.sentinel_tensors & other.sentinel_tensors
    return next((a.tensor for a in changed.args if "w" in a.access and a.tensor.name in kept), None) if changed else None


class ProgramTrial(Generic[P]):
    """Points in the token's program.

    name    of what is tuned, for errors
    tables  what answers for a point
    """

    def __init__(self, tokens: Tokens, ctx: LowerContext, name: str, tables: Callable[[P], Chooser]) -> None:
        self._tokens, self._ctx, self._name, self._tables = tokens, ctx, name, tables
        self._schedules: dict[P, Schedule] = {}
        self._programs: dict[P, TokenProgram] = {}
        self._present = TokenProgram(tokens, plan(tokens.graph, ctx))
        self._want = [(self._present.run(token), self._present.experts()) for token in CHECKED_TOKENS]

    def __enter__(self) -> Self:
        if self._present.timed_out or not all(np.isfinite(logits).all() for logits, _ in self._want):
            self.__exit__()
            raise SweepError(
                f"[tune] {self._name}: the program that the tables lead to gives no right result: a wait for the stage before was "
                "given up, or logits are not numbers. vkback doctor looks for the setting that cures it"
            )
        return self

    def __exit__(self, *_: object) -> None:
        for program in (self._present, *self._programs.values()):
            program.close()

    def compile(self, points: Iterable[P]) -> None:
        dispatches: list[Dispatch] = []
        for point in points:
            with suppress(PlanError):  # said again when the point is tried
                dispatches += self._schedule(point).dispatches()
        compile_kernels(self._tokens.device, self._tokens.library, dispatches)

    def wrong(self, point: P) -> str:
        program = self._program(point)
        verdicts = [self._verdict(program, i) for i in range(len(CHECKED_TOKENS))]
        if program.timed_out:
            return "a wait for the stage before was given up"
        changed = first_changed(self._present.schedule, program.schedule)
        if changed is not None:
            self._present.run(CHECKED_TOKENS[-1])
            first = judge(program.output(changed), self._present.output(changed), FIRST_TOLERANCE)
            if not first.ok:
                return f"{changed.name}: {first.text}"
        faults = [v.text for v in verdicts if not v.ok]
        return f"logits of {len(faults)} tokens of {len(verdicts)}: {faults[0]}" if 2 * len(faults) > len(verdicts) else ""

    def _verdict(self, program: TokenProgram, i: int) -> Verdict:
        """Whether a program's logits of a checked token are those of the present one, or it has chosen other experts."""
        want, experts = self._want[i]
        got = program.run(CHECKED_TOKENS[i])
        verdict = judge(got, want, LOGITS_TOLERANCE)
        others = not all(map(np.array_equal, program.experts(), experts))
        return dataclasses.replace(verdict, ok=True) if others and np.isfinite(got).all() else verdict

    def measure(self, point: P, repetitions: int) -> Measurement:
        program = self._program(point)
        if not self._tokens.device.caps.software:
            warm_up(self._tokens.device, self._present.commands, WARM_S)
        return measurement_of([program.time_us() for _ in range(RUNS * repetitions)])

    def throughput(self, point: P) -> float:
        return self.measure(point, 1).us

    def nbytes(self, point: P) -> int:
        return self._program(point).nbytes

    def _schedule(self, point: P) -> Schedule:
        if point not in self._schedules:
            self._schedules[point] = plan(self._tokens.graph, dataclasses.replace(self._ctx, tuning=self._tables(point)))
        return self._schedules[point]

    def _program(self, point: P) -> TokenProgram:
        program = self._programs.pop(point, None) or TokenProgram(self._tokens, self._schedule(point))
        self._programs[point] = program  # the last used last
        if len(self._programs) > KEPT_PROGRAMS:
            self._programs.pop(next(iter(self._programs))).close()
        return program


class ProgramSweep(Sweep):
    """Tunes jobs in the program of a model's token; each begins with what the tables say once the one before is done."""

    relative_noise: ClassVar[float] = TOKEN_NOISE

    def __init__(self, model: Model, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model = model

    def run(self, jobs: Sequence[Job], *, resume: bool = False) -> list[TuneResult]:
        if resume and all(self.own.journal.finished(job.key) for job in jobs):
            return []  # no need to load the weights
        with Tokens(self._model, self.device, self.library, self.ctx) as self._tokens:
            return super().run(jobs, resume=resume)

    def _keep(self, result: TuneResult) -> None:
        super()._keep(result)
        self.ctx = dataclasses.replace(self.ctx, tuning=self.own.tables())

    def _prepare(self, job: Job) -> Callable[[], Trial]:
        return lambda: ProgramTrial(self._tokens, self.ctx, job.program, partial(replaced, self.ctx.tuning, job))

    def _guesses(self, job: Job, shipped: Point) -> list[Point]:
        if self.device.caps.software:
            return super()._guesses(job, shipped)
        if job.product.out == "F32" and job.product.glu:
            cores = self.device.caps.shader_cores or 64
            return [Point(1024, 32, 2, unroll, 1, 0, cores, 0) for unroll in (1, 2)] + [Point(256, 32, 4, 1, 1, 0, 3 * cores, 0)]
        plain = job.product.out == "F32" and "norm" not in job.product.roles
        return [Point(*shape, 1, 0, 0, 0) for shape in (WAITING_STARTS if plain else PROLOGUE_STARTS)]

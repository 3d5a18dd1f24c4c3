"""Trials in the program of a model's token, and GEMVs tuned so (vkback/plan/sync.py has the barrier-free stages).

A barrier-free stage starts while the one before it still runs. Its best shape differs from that of a chain of launches with barriers:
larger workgroups, with all their weights in flight while they spin. So the point under trial is planned into the token's schedule, and the
measure is the time of a token. A point is right where the first result of its kernel and the logits of a token equal those of the present
program within rounding, and no wait timed out. Rows found so say `sync = "sentinel"`.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Generic, Self

import numpy as np

from vkback.autotune.chain_sweep import guesses
from vkback.autotune.gemvs import Gemvs
from vkback.autotune.points import Point, Task
from vkback.autotune.search import P, SweepError
from vkback.autotune.tunable import Trial
from vkback.evaluate.judge import Verdict, judge
from vkback.graph import Tensor
from vkback.ops.case import Tolerance
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import Chooser
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear import linear_tolerance
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import compile_kernels
from vkback.timing.launches import WARM_S, Measurement, summarize, warm_up
from vkback.timing.token_program import TokenProgram, Tokens
from vkback.tuning.lookup import Overrides, Tuning

TOKEN_NOISE = 0.001
"""Relative differences of a token's time below this are noise. One kernel is a small part of a token: the best shape of a GEMV that
takes a tenth of it seldom saves more than a hundredth, which a chain's sweep would call noise."""

LOGITS_TOLERANCE = Tolerance(
    5e-3,
    1.0,
    "sums in another order round otherwise to Q8_1 now and then, and layers pass that on: NMSE 2.5e-4 seen after 24 layers. One "
    "wrong row of 2048 in each of 24 layers is an NMSE of 1e-2",
)

CHECKED_TOKENS = (0, 37, 101)
"""Tokens whose logits are compared, of which most must agree: a wrong kernel is wrong for every token. Where two experts are all but
equally likely, another order of additions chooses the other, and logits are others (NMSE up to 3.1e-2 seen in gpt-oss). Such a token counts
as one that agrees; there the first result of the changed kernel speaks."""

FIRST_TOLERANCE = linear_tolerance(q8_in=True, q8_out=True, glu=True)
"""Of the first tensor that a changed kernel makes, from inputs of the same bits: the widest bound of any GEMV."""

RUNS = 3
"""Runs of a recording in one measurement, for each repetition requested."""

KEPT_PROGRAMS = 8
"""As many as a duel, or a second measurement of the best points, takes turns with."""

WAITING_STARTS = (
    (1024, 64, 2, 1),
    (1024, 64, 2, 2),
    (1024, 32, 1, 4),
    (1024, 32, 2, 2),
    (1024, 128, 4, 1),
    (1024, 128, 4, 2),
    (512, 64, 4, 2),
    (512, 32, 2, 4),
)
"""Threads, lanes, rows and unroll that have won where x is copied as it is: a whole tile's weights are in flight before x is there."""

PROLOGUE_STARTS = tuple((wg, lanes, rows, 1) for wg, lanes, rows in itertools.product((1024, 512), (16, 32, 64, 8), (2, 4, 1)))
"""The same where every workgroup computes x in its prologue, or rounds its results to Q8_1."""


def replaced(tables: Chooser, task: Task, point: Point) -> Overrides:
    """Tables that choose a point for one task, and for all others what they say."""
    return Overrides(tables, {"gemv": point._asdict()}, "sweep", {**task.match, **task.sizes})


def first_changed(present: Schedule, other: Schedule) -> Tensor | None:
    """The first tensor that a kernel of another schedule makes and none of the present one, where both keep it to the end. All that was
    made before it has the same bits in both. None: there is no such tensor."""
    kernels = {(d.label, d.kernel, d.groups) for d in present.dispatches()}
    changed = next((d for d in other.dispatches() if (d.label, d.kernel, d.groups) not in kernels), None)
    kept = present.sentinel_tensors & other.sentinel_tensors
    return next((a.tensor for a in changed.args if "w" in a.access and a.tensor.name in kept), None) if changed else None


class ProgramTrial(Generic[P]):
    """A trial whose points are planned into a token's program.

    name    of what is tuned, for errors
    tables  those that choose a point
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
                f"[tune] {self._name}: the program that the tables lead to gives no right result: a spin-wait timed out, "
                "or logits are not numbers. vkback doctor looks for the setting that cures it"
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
            return "a spin-wait timed out"
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
        return summarize([program.time_us() for _ in range(RUNS * repetitions)])

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


class InProgram(ABC):
    """The part of a `Tunable` that is timed in the program of a model's token. Each task begins with what the tables say once the one
    before is done.

    tokens  opens the model's weights, cache and inputs
    """

    relative_noise = TOKEN_NOISE
    ctx: LowerContext

    def __init__(self, tokens: Callable[[], AbstractContextManager[Tokens]]) -> None:
        self._open_tokens = tokens

    @contextmanager
    def opened(self) -> Iterator[None]:
        with self._open_tokens() as self._tokens:
            yield

    def learn(self, tables: Tuning) -> None:
        self.ctx = dataclasses.replace(self.ctx, tuning=tables)


class ProgramGemvs(InProgram, Gemvs):
    """GEMVs in the program of a model's token."""

    def __init__(self, tokens: Callable[[], AbstractContextManager[Tokens]], ctx: LowerContext) -> None:
        InProgram.__init__(self, tokens)
        Gemvs.__init__(self, ctx)

    def prepare(self, task: Task) -> Callable[[], Trial[Point]]:
        return lambda: ProgramTrial(self._tokens, self.ctx, task.program, partial(replaced, self.ctx.tuning, task))

    def guesses(self, task: Task, shipped: Point) -> list[Point]:
        if self.ctx.caps.software:
            return guesses(self.ctx.caps, shipped)
        if task.problem.out == "F32" and task.problem.glu:
            cores = self.ctx.caps.shader_cores or 64
            full = [Point(1024, 32, 2, unroll, "weights", groups=cores) for unroll in (1, 2)]
            return [*full, Point(256, 32, 4, 1, "weights", groups=3 * cores)]
        plain = task.problem.out == "F32" and "norm" not in task.problem.roles
        return [Point(*shape, prefetch="weights") for shape in (WAITING_STARTS if plain else PROLOGUE_STARTS)]

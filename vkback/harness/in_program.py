"""Sweeps of products inside the program of a model's token, where stages hand over without barriers (vkback/plan/handover.py).

A stage of such a program starts while the one before it still runs, so its best shape differs from that of a chain of launches with
barriers: larger workgroups, with all their weights in flight while they wait. Each point is therefore planned into the token's schedule in
the place of the product's present one, and what counts is the time of a token. A point is right where the first result of its kernel and
the logits of a token are those of the present program and no wait was given up. Rows found so say `handover = 1`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar, Generic, Self

import numpy as np

from vkback.device import Device
from vkback.graph import Graph, Tensor
from vkback.harness.climb import P, SweepError
from vkback.harness.judge import Verdict, judge
from vkback.harness.own_table import Result
from vkback.harness.points import Job, Point
from vkback.harness.runner import decoded
from vkback.harness.stage_times import loaded, zeroed
from vkback.harness.sweep import WARM_S, Sweep, Trial
from vkback.harness.timing import Lap, lap_of, span_us, stamp, warm_up
from vkback.models.engine import TOKENS_PER_SUBMIT, add_sampler, matrix_bytes
from vkback.models.registry import Model
from vkback.ops.base import Array, Chooser, Dispatch, LowerContext, PlanError, Tolerance
from vkback.ops.mat_vec import product_tolerance
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.plan.tuning import Fixed
from vkback.program import Program, compile_kernels
from vkback.shader import ShaderLibrary

TOKEN_NOISE = 0.001
"""Differences of a token's time below this share are noise. A product is a small part of a token: the best shape of one that takes a tenth
of it seldom saves more than a hundredth, which a chain's sweep would call noise."""

DEPTH = 128
"""Rows of the cache in use while a token is timed."""

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

INPUTS = ("tokens", "pos", "loop")

LOGITS = "result_output"

WAITING_STARTS = ((1024, 64, 2, 1), (1024, 64, 2, 2), (1024, 32, 1, 4), (1024, 32, 2, 2), (1024, 128, 4, 1), (1024, 128, 4, 2),
                  (512, 64, 4, 2), (512, 32, 2, 4))  # fmt: skip
"""Threads, lanes, rows and unroll that have won where x is copied as it is: a whole tile's weights are asked for before x is there."""

PROLOGUE_STARTS = tuple((wg, lanes, rows, 1) for wg, lanes, rows in itertools.product((1024, 512), (16, 32, 64, 8), (2, 4, 1)))
"""The same where every workgroup works x out by itself, or rounds its results to Q8_1."""


def token_graph(model: Model, n_ctx: int | None = None) -> Graph:
    """One token and the choice of the next, as generation runs it."""
    graph = model.graph(1, n_ctx or model.default_n_ctx, head="last")
    add_sampler(graph, greedy=True)
    return graph


def hands_over(model: Model, ctx: LowerContext) -> bool:
    """Whether the tables have stages of a model's token hand over without barriers."""
    return bool(plan(token_graph(model), ctx).joined)


def replaced(tables: Chooser, job: Job, point: Point) -> Fixed:
    """Tables that answer for one job with a point of its own."""
    return Fixed(tables, {"mat_vec": point._asdict()}, "sweep", {**job.match, "m": job.product.m, "k": job.product.k})


class Tokens:
    """A model's weights, cache and inputs on a device, for one program of its token after another. Use as a context manager.

    n_ctx  rows of the cache, by default as many as the engine makes
    depth  tokens before those that are timed, as far as they fit; DEPTH of them are real, rows beyond are zeros
    """

    def __init__(
        self, model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, *, n_ctx: int | None = None, depth: int = DEPTH
    ) -> None:
        self.model, self.device, self.library = model, device, library
        self.graph = token_graph(model, n_ctx)
        self._stack = ExitStack()
        tensors = plan(self.graph, ctx).tensors()
        try:
            self.weights, self.ranges = loaded(model, tensors, device, self._stack, progress=False)
            first = zeroed(device, [tensors[name] for name in INPUTS], self._stack)
            depth = self.depth = min(depth, (n_ctx or model.default_n_ctx) - 2 * TOKENS_PER_SUBMIT)
            device.upload(first["pos"], np.array([depth], np.int32))
            self._first_token = first["tokens"]
            self.begin = [(first[name], self.ranges[name]) for name in INPUTS]
            self.start, self.end = (stamp(device, label) for label in ("start", "end"))
            self._stack.callback(self.start.destroy)
            self._stack.callback(self.end.destroy)
            self._fill_cache(ctx, min(depth, DEPTH))
        except BaseException:
            self._stack.close()
            raise

    def begin_with(self, token: int) -> None:
        """The token that runs begin with."""
        self.device.upload(self._first_token, np.array([token], np.int32))

    def _fill_cache(self, ctx: LowerContext, depth: int) -> None:
        """Make the tokens that the cache holds while a token is timed: with zeros there, next to nothing would come out of attention."""
        program = Program(self.device, self.library, plan(self.graph, ctx), self.ranges, self.weights)
        token, last = program.record("token"), program.record("last token", copies=self.begin)
        for _ in range(depth):
            self.device.submit(token).wait()
        self.device.submit(last).wait()
        program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class TokenProgram:
    """A program of a model's token, recorded so that each run begins where the last began."""

    def __init__(self, tokens: Tokens, schedule: Schedule) -> None:
        self._tokens, self.schedule = tokens, schedule
        self.nbytes = matrix_bytes(schedule)
        self._program = Program(tokens.device, tokens.library, schedule, tokens.ranges, tokens.weights)
        self.commands = self._program.record("tokens", repeat=TOKENS_PER_SUBMIT, copies=tokens.begin)
        self._one = self._program.record("token", copies=tokens.begin)

    def time_us(self) -> float:
        """Microseconds a token, by the device's clock."""
        return span_us(self._tokens.device, self._tokens.start, self.commands, self._tokens.end) / TOKENS_PER_SUBMIT

    def run(self, token: int) -> Array:
        """The logits of a token, F32 [vocabulary], after a whole recording that has to leave everything as it was."""
        tokens = self._tokens
        tokens.begin_with(token % tokens.model.hp.n_vocab)
        tokens.device.submit([self.commands, self._one]).wait()
        tokens.begin_with(0)
        return self.download(LOGITS, np.float32)

    def logits(self) -> Array:
        """Of CHECKED_TOKENS: F32 [tokens, vocabulary]."""
        return np.stack([self.run(token) for token in CHECKED_TOKENS])

    def experts(self) -> list[Array]:
        """Which experts the last token chose, layer by layer, as far as the program keeps that to the end."""
        return [self.output(t) for t in self.schedule.tensors().values() if t.type == "I32" and t.name in self.schedule.handed]

    def output(self, tensor: Tensor) -> Array:
        """What a tensor that is handed over held at the end of the last run."""
        return decoded(tensor, self.download(tensor.name, np.uint8))

    def download(self, name: str, dtype: type[np.generic]) -> Array:
        """What a tensor of the program holds, as a row of values."""
        return self._tokens.device.download(self._program.range(name), dtype)

    @property
    def gave_up(self) -> bool:
        """Whether a wait of any run so far took too long."""
        return self._program.gave_up

    def close(self) -> None:
        self._program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def first_changed(present: Schedule, other: Schedule) -> Tensor | None:
    """The first tensor that a kernel of another schedule makes and none of the present one, where both keep it to the end. All that was
    made before it has the same bits in both. None: there is no such tensor."""
    kernels = {(d.label, d.kernel, d.groups) for d in present.dispatches()}
    changed = next((d for d in other.dispatches() if (d.label, d.kernel, d.groups) not in kernels), None)
    kept = present.handed & other.handed
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
        if self._present.gave_up or not all(np.isfinite(logits).all() for logits, _ in self._want):
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
        if program.gave_up:
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

    def lap(self, point: P, repetitions: int) -> Lap:
        program = self._program(point)
        if not self._tokens.device.caps.software:
            warm_up(self._tokens.device, self._present.commands, WARM_S)
        return lap_of([program.time_us() for _ in range(RUNS * repetitions)])

    def throughput(self, point: P) -> float:
        return self.lap(point, 1).us

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

    def run(self, jobs: Sequence[Job], *, resume: bool = False) -> list[Result]:
        if resume and all(self.own.journal.finished(job.key) for job in jobs):
            return []  # no need to load the weights
        with Tokens(self._model, self.device, self.library, self.ctx) as self._tokens:
            return super().run(jobs, resume=resume)

    def _keep(self, result: Result) -> None:
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

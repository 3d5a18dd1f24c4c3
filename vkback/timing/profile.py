"""Where the time of a model's phases goes, kernel by kernel, on the device and on the host.

A phase is a schedule that is replayed: a program of a prompt, one token, a batch of tokens. Its stages are timed in one of three ways:

- GPU timestamps between stages, where barriers stand between all of them.
- Clocks that the kernels read (vkback/timing/stage_clocks.py), where stages are barrier-free: these overlap, and a timestamp between them
  would need the barrier back. What the clocks do not cover, stages whose kernels have no marks, is what is left of the run between two
  timestamps.
- Timestamps with all barriers, where stages are barrier-free and their kernels cannot read the clock: the method says so.

Dispatches of one stage run side by side; its time is divided among them as they take by themselves.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from vkback.device import Commands, Device
from vkback.engine.prompts import LONGEST_SUBMIT_US
from vkback.engine.token_programs import SPIN_S
from vkback.ops.case import Array
from vkback.ops.dispatch import Dispatch
from vkback.plan.cost.forecast import Costs, dispatch_us, low_costs, moved_bytes, predicted_us
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.timing.launches import stamp
from vkback.timing.modules import Module, Share, label_parts, shares, weight_path
from vkback.timing.stage_clocks import (
    CALIBRATION_S,
    StageClock,
    clocks_cover,
    mark_names,
    read_marks,
    stages_of,
    ticks_between,
    with_clocks,
)

STAMPS, CLOCKS, BARRIERS = "timestamps", "kernel clocks", "timestamps with barriers"

WARM_S = 0.3

ALONE_RUNS = 3

EMPTY_RUNS = 9

AWAKE_S = 0.02
"""For so long a device works at least before each timed run whose marks are read back: it lowers its clocks while the host reads."""


def awake_s(idle_s: float) -> float:
    """How long a device works before a timed run, having idled for so long while the host read and reckoned: twice as long. Over hundreds
    of runs a device that idles most of the time lowers its clocks, whatever it did just before."""
    return max(AWAKE_S, 2 * idle_s)


Bind = Callable[[Schedule], Program]
"""A program over the model's weights, caches and the phase's inputs."""


GEMMS = ("coop_mat", "coop_reg", "coop_reg_experts", "coop_reg_heads", "int_dot", "f32")
"""Kernels of products of several tokens; which one a product takes stands with the kernels that were chosen."""


@dataclass(frozen=True)
class KernelCost:
    """One dispatch of a phase. Times are of all runs together, in microseconds; bytes and flops of one run.

    kernel, reason   the variant, and why it was chosen
    modules, fused   what it counts for, and tensors without a matrix that are part of it
    start_us, took_us  within the last run
    each_us          of each run
    """

    stage: int
    label: str
    op: str
    dispatch: Dispatch
    modules: tuple[Share, ...]
    fused: tuple[str, ...]
    runs: int
    gpu_us: float
    cpu_us: float
    nbytes: int
    flops: int
    predicted_us: float
    start_us: float
    took_us: float
    each_us: tuple[float, ...] = ()

    @property
    def kernel(self) -> str:
        """Its shader's name, with the family where that says more; "gemm" for all products of several tokens."""
        family, _, name = self.dispatch.kernel.source.removesuffix(".comp").partition("/")
        if family == "gemm" and name in GEMMS:
            return family
        return f"{family}/{name}" if family == "attention" and name != family else name

    @property
    def kind(self) -> str:
        """What kernels of different layers have in common: "gemv:attn.q+k+v"; without matrices the kernel's name."""
        matrices = [s for s in self.modules if s.matrix]
        if not matrices:
            return self.kernel
        first, *rest = [s.path[2:] or s.path for s in matrices]
        return f"{self.kernel}:{'+'.join(['.'.join(first), *(path[-1] for path in rest)])}"

    @property
    def name(self) -> str:
        """ "gemv:attn.q+k+v:L0", with the layer where it holds matrices; others of one kind share a name."""
        layer = label_parts(self.label)[1]
        return self.kind + (f":L{layer}" if layer is not None and any(s.matrix for s in self.modules) else "")

    @property
    def gb_s(self) -> float:
        return self.nbytes * self.runs / self.gpu_us / 1e3 if self.gpu_us > 0 else 0.0

    @property
    def gflops(self) -> float:
        return self.flops * self.runs / self.gpu_us / 1e3 if self.gpu_us > 0 else 0.0


@dataclass(frozen=True)
class Phase:
    """What replays of a schedule took, in microseconds of all runs together.

    tokens    of one run
    wall_us   of the timed replays, by the host's clock; gpu_us: of all their stages
    plain_us  of as many replays without stamps and marks, between two timestamps
    method    how stages were timed
    rows      of the cache in use once each run has run
    submit_us, empty_us  parts of the wall time: in the host's calls that submit; and all of as many replays with nothing in them but two
              timestamps, from the submit to the host's knowing of the end, less what is between the timestamps
    """

    name: str
    tokens: int
    runs: int
    kernels: tuple[KernelCost, ...]
    wall_us: float
    plain_us: float
    method: str
    notes: tuple[str, ...] = field(default=())
    submit_us: float = 0.0
    empty_us: float = 0.0
    rows: tuple[int, ...] = ()

    @property
    def gpu_us(self) -> float:
        return sum(k.gpu_us for k in self.kernels)

    @property
    def gap_us(self) -> float:
        """Wall time in which no stage of the replays ran: before the first one, between submits, and until the host knows of the end."""
        return self.wall_us - self.gpu_us

    @property
    def overhead(self) -> float:
        """What stamps or marks add, as a share of the time without them."""
        return self.gpu_us / self.plain_us - 1 if self.plain_us > 0 else 0.0

    @property
    def predicted_us(self) -> float:
        return sum(k.predicted_us for k in self.kernels)

    def tree(self, root: str) -> Module:
        """Modules of the model with their times."""
        top = Module(root)
        for kernel in self.kernels:
            for tensor in kernel.fused:
                top.at(weight_path(tensor)).fused_into = kernel.name
            for share in kernel.modules:
                module = top.at(share.path)
                module.gpu_us += share.part * kernel.gpu_us
                module.cpu_us += share.part * kernel.cpu_us
                module.own_calls += kernel.runs
        return top


def measure_phase(
    name: str,
    tokens: int,
    device: Device,
    schedule: Schedule,
    bind: Bind,
    begin: Callable[[int], int],
    sizes: Mapping[str, int],
    costs: Costs,
    runs: int,
) -> Phase:
    """Time a schedule.

    begin  write the inputs of a run of this number; gives the rows of the cache in use once it has run
    sizes  bytes of the file's tensors
    """
    with ExitStack() as stack:
        meter = _Meter(device, schedule, bind, begin, runs, stack)
        plain = meter.plain()
        alone = meter.each_dispatch_us()
        # The shader clock costs no barrier; time stamps between stages do.
        clocked = device.caps.shader_clock and clocks_cover(schedule, device.caps.max_storage_bindings)
        times, starts, wall = meter.clocked() if clocked else meter.stamped()
        empty_us = meter.empty()
        record_us = meter.record_us
        rows = meter.rows
    method = CLOCKS if clocked else BARRIERS if schedule.barrier_free else STAMPS
    kernels: list[KernelCost] = []
    total, last = times.sum(axis=0), times[-1]
    number = 0
    for i, stage in enumerate(schedule.stages):
        # A stage's time is divided among its dispatches as their times alone are.
        parts = np.array([alone.get((i, j), 1.0) for j in range(len(stage))])
        parts = parts / parts.sum() if parts.sum() > 0 else np.full(len(stage), 1 / len(stage))
        # The prediction is divided by bytes: all dispatches of a stage read at the same rate.
        expected = predicted_us(stage, costs, rows, i in schedule.barrier_free)
        bytes_each = np.array([max(1, moved_bytes(d, rows)) for d in stage], np.float64)
        for d, part, share in zip(stage, parts, bytes_each / bytes_each.sum(), strict=True):
            found, fused = shares(d, sizes)
            kernels.append(
                KernelCost(
                    i,
                    d.label,
                    d.op,
                    d,
                    tuple(found),
                    tuple(fused),
                    runs,
                    float(part * total[i]),
                    record_us[number],
                    moved_bytes(d, rows),
                    d.flops,
                    float(runs * share * expected),
                    float(starts[i]),
                    float(part * last[i]),
                    tuple((part * times[:, i]).tolist()),
                )
            )
            number += 1
    return Phase(
        name, tokens, runs, tuple(kernels), wall, plain, method, tuple(meter.notes), meter.submit_us, empty_us, tuple(meter.rows_of)
    )


class _Meter:
    """The replays of one schedule."""

    def __init__(self, device: Device, schedule: Schedule, bind: Bind, begin: Callable[[int], int], runs: int, stack: ExitStack) -> None:
        self.device, self.schedule, self.bind, self.begin, self.runs = device, schedule, bind, begin, runs
        self.stack = stack
        self.notes: list[str] = []
        self.rows = 0
        self.rows_of: list[int] = []
        self.stamps = [2]
        self.submit_us = 0.0
        self.record_us: list[float] = []
        self.program = self._program(schedule)
        self._start, self._end = (stamp(device, label) for label in ("start", "end"))
        stack.callback(self._start.destroy)
        stack.callback(self._end.destroy)

    def _program(self, schedule: Schedule) -> Program:
        program = self.bind(schedule)
        self.stack.callback(program.close)
        return program

    def parts(self) -> list[range]:
        """Stages of each submit: none is so long that a driver takes it for a hang."""
        schedule, stages = self.schedule, range(len(self.schedule.stages))
        if schedule.barrier_free:
            return [stages]
        costs = low_costs(self.device.caps)
        cuts, spent = [0], 0.0
        for i in stages:
            own = costs.stage_us + sum(dispatch_us(d, costs) for d in schedule.stages[i])
            if i > cuts[-1] and spent + own > LONGEST_SUBMIT_US:
                cuts.append(i)
                spent = 0.0
            spent += own
        return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(stages)], strict=True)]

    def plain(self) -> float:
        """Microseconds of all runs as planned, between two timestamps."""
        marks = [time.perf_counter()]
        note = lambda _: marks.append(time.perf_counter())  # noqa: E731
        commands = [self.program.record("plain", part=part, on_dispatch=note) for part in self.parts()]
        whole = time.perf_counter() - marks[0]
        steps = np.diff(marks)
        # Descriptors are written and commands emitted at the end of a recording, alike for every dispatch.
        rest = (whole - float(steps.sum())) / max(1, len(steps))
        self.record_us = [1e6 * (float(s) + rest) for s in steps]
        self._warm(commands)
        total = 0.0
        for run in range(self.runs):
            self.rows = self.begin(run)
            self.rows_of.append(self.rows)
            self.device.submit([self._start, *commands, self._end]).wait()
            ((_, begun),), ((_, ended),) = self._start.timestamps(), self._end.timestamps()
            total += (ended - begun) / 1e3
        return total

    def _marks(self, schedule: Schedule, program: Program) -> dict[int, Array]:
        """The marks of the last run, read back in one go."""
        names = mark_names(schedule)
        ranges = [program.range(name) for name in names]
        raw = self.device.download_many(ranges)
        ends = np.cumsum([r.size for r in ranges])
        parts = {name: raw[end - r.size : end].view(np.uint32) for name, r, end in zip(names, ranges, ends, strict=True)}
        return read_marks(schedule, parts.__getitem__)

    def _nothing(self, count: int) -> Commands:
        """A recording of so many timestamps."""
        rec = self.device.recorder("empty", timestamps=count)
        for i in range(count):
            rec.timestamp(f"stamp {i}")
        return rec.finish()

    def _warm(self, commands: Sequence[Commands], seconds: float = WARM_S) -> None:
        """Run recordings for so long, for the clocks to rise; on CPU drivers once, for the driver to compile. Each run begins anew: the
        program of a token moves its position on."""
        deadline = time.perf_counter() + (0.0 if self.device.caps.software else seconds)
        while True:
            self.begin(0)
            self.device.submit(commands).wait()
            if time.perf_counter() >= deadline:
                return

    def _timed(self, submits: Sequence[Sequence[Commands]]) -> float:
        """Microseconds until the host knows that all is done; the host waits as the engine does."""
        begun = time.perf_counter()
        tickets = [self.device.submit(some) for some in submits]
        self.submit_us += 1e6 * (time.perf_counter() - begun)
        for ticket in tickets:
            ticket.wait(spin_s=0.0 if self.device.caps.software else SPIN_S)
        return 1e6 * (time.perf_counter() - begun)

    def empty(self) -> float:
        """Microseconds that as many runs take with nothing between their timestamps, which are as many as those of the timed runs: what
        submits, timestamps made ready and waiting cost by themselves."""
        pairs = [[self._nothing(count)] for count in self.stamps]
        found, spent = [], self.submit_us
        for _ in range(EMPTY_RUNS):
            self.begin(0)
            wall = self._timed(pairs)
            stamps = [part.timestamps() for (part,) in pairs]
            found.append(wall - sum(some[-1][1] - some[0][1] for some in stamps) / 1e3)
        self.submit_us = spent
        for commands in (c for pair in pairs for c in pair):
            commands.destroy()
        return self.runs * float(np.median(found))

    def stamped(self) -> tuple[Array, Array, float]:
        """(microseconds [runs, stages], starts within the last run [stages], wall time)."""
        commands = [self.program.record("stamped", timestamps=True, part=part) for part in self.parts()]
        self._warm(commands)
        times: list[Array] = []
        wall = 0.0
        starts: list[float] = []
        self.stamps, self.submit_us = [len(part) + 1 for part in self.parts()], 0.0
        for run in range(self.runs):
            self.begin(run)
            wall += self._timed([[part] for part in commands])
            marks = [np.array([ns for _, ns in part.timestamps()]) for part in commands]
            times.append(np.concatenate([np.diff(m) / 1e3 for m in marks]))
            starts = [float(t - marks[0][0]) / 1e3 for m in marks for t in m[:-1]]
        if len(commands) > 1:
            self.notes.append(f"{len(commands)} submits a run, none predicted to take over {LONGEST_SUBMIT_US / 1e6:g} s")
        return np.stack(times), np.array(starts), wall

    def clocked(self) -> tuple[Array, Array, float]:
        """As `stamped`, by the kernels' clocks."""
        schedule = with_clocks(self.schedule, self.device.caps.max_storage_bindings)
        program = self._program(schedule)
        commands = program.record("clocks")
        barriers, _, _ = self.stamped()
        by_stamps = np.median(barriers, axis=0)
        us_a_tick = self._calibrated(schedule, program, commands)
        times: list[Array] = []
        wall = 0.0
        self.stamps, self.submit_us = [2], 0.0
        idle_from = time.perf_counter()
        for run in range(self.runs):
            self._warm([commands], awake_s(time.perf_counter() - idle_from))
            self.begin(run)
            wall += self._timed([[self._start, commands, self._end]])
            idle_from = time.perf_counter()
            ((_, first),), ((_, last),) = self._start.timestamps(), self._end.timestamps()
            marks = self._marks(schedule, program)
            times.append(self._divided((last - first) / 1e3, stages_of(schedule, marks, us_a_tick), by_stamps))
        known = sum(bool(np.isfinite(t)) for t in self._took(stages_of(schedule, marks, us_a_tick)))
        self.notes.append(
            f"{known} of {len(schedule.stages)} stages by clocks that their kernels read, from the end of the stage before to their own; "
            "the others by what is left of the run"
        )
        starts = np.concatenate([[0.0], np.cumsum(times[-1])[:-1]])
        return np.stack(times), starts, wall

    def _took(self, clocks: Sequence[StageClock]) -> Array:
        took = np.full(len(self.schedule.stages), np.nan)
        for clock in clocks:
            took[clock.stage] = clock.took_us
        return took

    def _divided(self, span_us: float, clocks: Sequence[StageClock], by_stamps: Array) -> Array:
        """Times of all stages that add up to the run's: those of the clocks, and of the rest by their part of the timestamps."""
        took = self._took(clocks)
        unknown = ~np.isfinite(took)
        left = max(0.0, span_us - float(np.nansum(took)))
        return np.where(unknown, left * by_stamps / max(float(by_stamps[unknown].sum()), 1e-9), took)

    def _calibrated(self, schedule: Schedule, program: Program, commands: Commands) -> float:
        """Microseconds of a tick of the kernels' clock, from two runs some time apart."""
        found = []
        for _ in range(2):
            time.sleep(CALIBRATION_S)
            self._warm([commands])
            self.begin(0)
            self.device.submit([commands, self._end]).wait()
            ((_, ended),) = self._end.timestamps()
            found.append((self._marks(schedule, program), ended))
        (first, begun), (second, ended) = found
        return float((ended - begun) / 1e3 / ticks_between(first, second))

    def each_dispatch_us(self) -> dict[tuple[int, int], float]:
        """Microseconds of each dispatch of stages that have several, by stage and index in it, a barrier before and after each."""
        several = [(i, j) for i, stage in enumerate(self.schedule.stages) if len(stage) > 1 for j in range(len(stage))]
        if not several:
            return {}
        order = [(i, j) for i, stage in enumerate(self.schedule.stages) for j in range(len(stage))]
        single = dataclasses.replace(self.schedule, stages=[[d] for d in self.schedule.dispatches()], barrier_free=frozenset())
        meter = _Meter(self.device, single, self.bind, self.begin, ALONE_RUNS, self.stack)
        times, _, _ = meter.stamped()
        return dict(zip(order, np.median(times, axis=0).tolist(), strict=True))

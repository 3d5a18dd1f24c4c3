"""Times nodes on a device with cold weights: launches take turns with copies of the weights that are together larger than any cache.

Two figures: throughput (independent launches back to back, no barrier between) and latency (each launch waits for the one before).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from weakref import WeakKeyDictionary

import numpy as np

from vkback.device import BufferRange, Capabilities, Commands, Device
from vkback.engine.prompts import LONGEST_SUBMIT_US
from vkback.graph import Node
from vkback.ops.case import Array, Problem
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.ops.storage import nbytes
from vkback.plan.cost.forecast import dispatch_us, low_costs
from vkback.plan.schedule import into_stages
from vkback.program import compile_kernels
from vkback.program.values import NAN_WORD, decoded, stored_bytes
from vkback.shader import ShaderLibrary
from vkback.timing.copies import copied_bytes, rotates, upload_copies

COLD_BYTES = 512 << 20
"""Copies of weights that launches take turns with: several times the largest last-level cache of today's GPUs (96 MiB)."""

STEADY_BYTES = 4 << 30
"""Bytes read in one recording: about a millisecond on the fastest memory there is."""

MAX_LAUNCHES = 2000

SCRATCH_BYTES = 64 << 20
"""Memory for what launches need beside the problem's tensors, unless one launch alone needs more."""

SLOWEST_CPU_LAUNCH_US = 2e6
"""Of a launch on a CPU driver, which resets nothing, at the low rates of `low_costs`: beyond it a measurement takes minutes."""

WARM_S = 0.005
"""Warm-up before a measurement of a sweep, in seconds: the GPU has been busy all along."""


def span_us(device: Device, *commands: Commands) -> float:
    """Run recordings with two timestamps in all; microseconds between them."""
    device.submit(commands).wait()
    _last_work[device] = time.perf_counter()
    (_, start), (_, end) = (stamp for c in commands for stamp in c.timestamps())
    return (end - start) / 1e3


def stamp(device: Device, label: str) -> Commands:
    """A recording of one timestamp, to be submitted before or after others."""
    rec = device.recorder(label, timestamps=1)
    rec.timestamp(label)
    return rec.finish()


def predicted_us(dispatches: Sequence[Dispatch], caps: Capabilities) -> float:
    """Microseconds that a launch takes at most, at the low rates of a device that was not measured."""
    costs = low_costs(caps)
    return sum(dispatch_us(d, costs) for d in dispatches)


def too_long(dispatches: Sequence[Dispatch], caps: Capabilities) -> str:
    """Why a launch is not timed: it may be so long that a driver takes it for a hang; "" when it is short enough."""
    us, limit = predicted_us(dispatches, caps), SLOWEST_CPU_LAUNCH_US if caps.software else LONGEST_SUBMIT_US
    rest = "a measurement would take minutes" if caps.software else "drivers take a long submit for a hang"
    return f"one launch may take {us / 1e6:.1f} s on such a device, more than {limit / 1e6:g} s; {rest}" if us > limit else ""


def read_share(node: Node) -> float:
    """The part of a node's weights that one launch reads: of a stack of experts those that are chosen, before it or by it."""
    stacks = [t for t in node.inputs if t.kind == "weight" and len(t.shape) == 3]
    chosen = [t for t in (*node.inputs, *node.outputs) if t.type == "I32" and len(t.shape) == 2]
    if not stacks or not chosen:
        return 1.0
    return min(1.0, prod(chosen[0].shape) / stacks[0].shape[0])


@dataclass(frozen=True)
class Measurement:
    """Microseconds a launch: the median over repetitions, the spread (half the interquartile range), and each repetition."""

    us: float
    spread_us: float
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: medians over repetitions, with the spread (half the interquartile range).

    samples_us  throughput of each repetition; launches: in one recording; nbytes, flops: of one launch
    """

    throughput_us: float
    throughput_spread_us: float
    latency_us: float
    latency_spread_us: float
    nbytes: int
    flops: int = 0
    launches: int = 0
    samples_us: tuple[float, ...] = ()

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.throughput_us / 1e3


IDLE_S = 0.3
"""A GPU that has had no work for longer may have lowered its clocks."""

RISE_S = 0.8
"""What raising them takes: an H200 stays at 345 of 1980 MHz for the first 0.3 s of work and is at the top after 0.6."""

REST = 0.25
"""Pause after each run of a warm-up, in times of the run. An H200 that reads at full rate and computes beside it is soon at its 700 W;
its clock then falls from 1980 to 1725 MHz, and what computes much takes up to a fifth longer, more or less by what was timed before.
Where pauses are twice as long as the runs it falls, too, to 930 MHz, as if it were idle."""

_last_work: WeakKeyDictionary[Device, float] = WeakKeyDictionary()


def warm_up(device: Device, commands: Commands, seconds: float = 0.05) -> None:
    """Run a recording for `seconds`, resting in between, and for RISE_S where the device has been idle: at low clocks it reads at less than
    half its rate.

    Once is enough where the clock does not depend on load (CPU drivers).
    """
    begin = time.perf_counter()
    if begin - _last_work.get(device, -math.inf) > IDLE_S:
        seconds = max(seconds, RISE_S)
    deadline = begin + (0.0 if device.caps.device_type == "cpu" else seconds)
    device.submit(commands).wait()
    while (now := time.perf_counter()) < deadline:
        time.sleep(REST * (now - begin))
        begin = time.perf_counter()
        device.submit(commands).wait()
    _last_work[device] = time.perf_counter()


class Bench:
    """One problem's tensors on a device, weights and caches in several copies, to time any lowering of its node.

    A node with the same tensors but fewer tokens may be timed, too.
    copies      of each weight and cache
    cold_bytes  what the copies are together, as far as there is memory
    """

    def __init__(
        self, device: Device, library: ShaderLibrary, problem: Problem, ctx: LowerContext, *, cold_bytes: int = COLD_BYTES
    ) -> None:
        self.device, self.library, self.problem = device, library, problem
        tensors = {t.name: t for t in (*problem.node.inputs, *problem.node.outputs)}
        heavy = [t for t in tensors.values() if rotates(t)]
        light = [t for t in tensors.values() if not rotates(t)]
        one = copied_bytes(heavy, ctx.caps)
        room = device.free_memory() // 2
        touched = max(1, int(one * read_share(problem.node)))
        self.copies = max(1, min(256, -(-cold_bytes // touched), room // one)) if heavy else 1
        self._arena = device.arena("timing", self.copies * one + sum(nbytes(t) + 512 for t in light) + 1, "device")
        self._scratch, self._scratch_bytes = device.arena("timing scratch", SCRATCH_BYTES, "device"), SCRATCH_BYTES
        self._own: list[dict[str, BufferRange]] = []
        self._ranges: dict[str, BufferRange] = {}
        for t in light:
            self._ranges[t.name] = self._arena.alloc(nbytes(t), t.name)
            value = problem.values.get(t.name)
            if value is not None:
                device.upload(self._ranges[t.name], stored_bytes(t, value, ctx.caps)[0])
        self._copies = {t.name: upload_copies(device, self._arena, ctx.caps, t, problem.values[t.name], self.copies) for t in heavy}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.destroy()
        self._scratch.destroy()

    def time(
        self, ctx: LowerContext, *, launches: int | None = None, repetitions: int = 6, rounds: int = 3, node: Node | None = None
    ) -> Timing:
        """Throughput and latency of the node as `ctx` lowers it, measured in turn, so that a slow drift shows in the spread."""
        node = node or self.problem.node
        dispatches = OPS[node.op].lower(node, ctx)
        count = launches or self.launches(dispatches)
        recorded = [self._record(dispatches, count, chained) for chained in (False, True)]
        times: list[list[float]] = [[], []]
        for round in range(rounds):
            for commands, found in zip(recorded, times, strict=True):
                warm_up(self.device, commands, 0.01 if round else 0.05)
                found += self._measure(commands, count, -(-repetitions // rounds))
        for commands in recorded:
            commands.destroy()
        through, latency = map(summarize, times)
        return Timing(
            through.us,
            through.spread_us,
            latency.us,
            latency.spread_us,
            sum(d.nbytes for d in dispatches),
            sum(d.flops for d in dispatches),
            count,
            through.samples,
        )

    def launches(self, dispatches: Sequence[Dispatch]) -> int:
        """How many launches make one recording: whole rounds through the copies, on a GPU enough of them for about a millisecond, so that
        clocks and timestamps are steady; fewer where they might take longer than a submit should."""
        once = max(1, sum(d.nbytes for d in dispatches))
        enough = 16 if self.device.caps.device_type == "cpu" else min(MAX_LAUNCHES, STEADY_BYTES // once)
        count = max(1, -(-enough // self.copies)) * self.copies
        most = max(1, int(LONGEST_SUBMIT_US / max(1.0, predicted_us(dispatches, self.device.caps))))
        return count if count <= most else most // self.copies * self.copies or most

    def measure(
        self,
        ctx: LowerContext,
        *,
        chained: bool,
        launches: int | None = None,
        repetitions: int = 5,
        warm_s: float = 0.05,
        node: Node | None = None,
    ) -> Measurement:
        """Time launches of the node as `ctx` lowers it. chained: each waits for the one before."""
        node = node or self.problem.node
        dispatches = OPS[node.op].lower(node, ctx)
        count = launches or self.launches(dispatches)
        commands = self._record(dispatches, count, chained)
        warm_up(self.device, commands, warm_s)
        times = self._measure(commands, count, repetitions)
        commands.destroy()
        return summarize(times)

    def _measure(self, commands: Commands, count: int, repetitions: int) -> list[float]:
        """Microseconds a launch of each repetition."""
        return [span_us(self.device, commands) / count for _ in range(repetitions)]

    def outputs(self, ctx: LowerContext, node: Node | None = None) -> dict[str, Array]:
        """The node's outputs, filled with NaN before it runs once on the first copy."""
        node = node or self.problem.node
        names = {t.name: t for t in node.outputs if t.name in self._ranges}
        for t in names.values():
            self.device.upload(self._ranges[t.name], np.full(-(-nbytes(t) // 4), NAN_WORD, np.uint32).view(np.uint8)[: nbytes(t)])
        commands = self._record(OPS[node.op].lower(node, ctx), 1, True)
        self.device.submit(commands).wait()
        commands.destroy()
        stored = {name: self.device.download(self._ranges[name].slice(0, nbytes(t))) for name, t in names.items()}
        return {name: decoded(t, stored[name], self.device.caps) for name, t in names.items()}

    def _record(self, dispatches: Sequence[Dispatch], count: int, chained: bool) -> Commands:
        """Launches that wait for each other, or else stage after stage, each over all launches."""
        stages = into_stages(dispatches)
        turns = [[(stage, i)] for i in range(count) for stage in stages] if chained else [[(s, i) for i in range(count)] for s in stages]
        kernels = compile_kernels(self.device, self.library, dispatches)
        self._place(dispatches, count)
        rec = self.device.recorder("timing", timestamps=2)
        rec.barrier()
        rec.timestamp("start")
        for t, turn in enumerate(turns):
            if t:
                rec.barrier()
            for stage, launch in turn:
                for d in stage:
                    rec.dispatch(kernels[d.kernel, len(d.args), len(d.push)], [self._bind(a, launch) for a in d.args], d.push, d.groups)
        rec.timestamp("end")
        rec.host_barrier()
        return rec.finish()

    def _place(self, dispatches: Sequence[Dispatch], count: int) -> None:
        """Memory for what the dispatches need beside the problem's tensors: each launch its own as far as there is room, since launches
        that run at once must not share counters."""
        known = self._ranges.keys() | self._copies.keys()
        own = {a.tensor.name: a.tensor for d in dispatches for a in d.args if a.tensor.name not in known}
        self._own = []
        one = sum(nbytes(t) + 512 for t in own.values())
        if one > self._scratch_bytes:  # split-K sums of many tokens; nobody keeps a recording of other dispatches
            self._scratch.destroy()
            self._scratch, self._scratch_bytes = self.device.arena("timing scratch", one, "device"), one
        self._scratch.reset()
        for _ in range(max(1, min(count, SCRATCH_BYTES // one)) if one else 1):
            self._own.append({t.name: self._scratch.alloc(nbytes(t), t.name) for t in own.values()})
        if any(t.kind == "counter" for t in own.values()):
            rec = self.device.recorder("counters")
            for ranges in self._own:
                for name, where in ranges.items():
                    if own[name].kind == "counter":
                        rec.fill(where, 0)
            self.device.run(rec)

    def _bind(self, arg: Arg, launch: int) -> BufferRange:
        name = arg.tensor.name
        if name in self._ranges:
            return self._ranges[name]
        if name in self._copies:
            return self._copies[name][launch % self.copies][arg.shard]
        return self._own[launch % len(self._own)][name]


def summarize(times: Sequence[float]) -> Measurement:
    """Median and spread of repetitions, in microseconds."""
    return Measurement(float(np.median(times)), float(np.subtract(*np.percentile(times, [75, 25])) / 2), tuple(times))

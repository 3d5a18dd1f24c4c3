"""Times one node on a device with cold weights: copies of the weight larger than the last cache are read in turn.

Two figures: throughput (independent launches back to back, no barrier between) and latency (each launch waits for the one before).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod

import numpy as np

from vkback import quants
from vkback.device import BufferRange, Commands, Device
from vkback.graph import Node
from vkback.ops.base import OPS, Dispatch, LowerContext, Problem, nbytes, shards
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary

COLD_BYTES = 512 << 20
"""Weights in rotation: several times the largest last-level cache of today's GPUs (96 MiB)."""

STEADY_BYTES = 4 << 30
"""Bytes read in one recording: about a millisecond on the fastest memory there is."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch, median over repetitions with the spread (half the range between first and third quartile)."""

    throughput_us: float
    throughput_spread_us: float
    latency_us: float
    latency_spread_us: float
    nbytes: int

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.throughput_us / 1e3


def warm_up(device: Device, commands: Commands, seconds: float = 0.05) -> None:
    """Run a recording until the clocks are up: an idle GPU lowers them within a second or two, to less than half of its read rate.

    Once is enough where the clock does not depend on load (CPU drivers).
    """
    deadline = time.perf_counter() + (0.0 if device.caps.device_type == "cpu" else seconds)
    device.submit(commands).wait()
    while time.perf_counter() < deadline:
        device.submit(commands).wait()


class Bench:
    """One problem's tensors on a device, weights in several copies, ready to time any lowering of its node."""

    def __init__(self, device: Device, library: ShaderLibrary, problem: Problem, ctx: LowerContext, *, cold_bytes: int = COLD_BYTES) -> None:
        self.device, self.library, self.problem = device, library, problem
        node = problem.node
        heavy = [t for t in node.inputs if t.kind == "weight" and len(t.shape) > 1]
        one = sum(s.layout.nbytes for t in heavy for s in shards(t, ctx.caps))
        self.copies = max(1, min(256, -(-cold_bytes // one))) if heavy else 1
        light = [t for t in (*node.inputs, *node.outputs) if t not in heavy]
        room = self.copies * (one + 1024 * len(heavy) * 4) + sum(nbytes(t) + 512 for t in light) + (64 << 20)
        self._arena = device.arena("timing", room, "device")
        self._ranges: dict[str, BufferRange] = {}
        self._weights: list[dict[str, list[BufferRange]]] = []
        for t in light:
            self._ranges[t.name] = self._arena.alloc(nbytes(t), t.name)
            value = problem.values.get(t.name)
            if value is not None:
                device.upload(self._ranges[t.name], np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        for i in range(self.copies):
            self._weights.append({t.name: [self._arena.alloc(s.layout.nbytes, t.name) for s in shards(t, ctx.caps)] for t in heavy})
        for t in heavy:
            raw = problem.values[t.name].reshape(prod(t.shape[:-1]), -1)
            for j, s in enumerate(shards(t, ctx.caps)):
                device.upload(self._weights[0][t.name][j], quants.to_device(t.type, raw[s.row0 : s.row0 + s.rows], t.shape[-1]))
        if self.copies > 1:
            rec = device.recorder("copies")
            for i in range(1, self.copies):
                for name, first in self._weights[0].items():
                    for source, target in zip(first, self._weights[i][name], strict=True):
                        rec.copy(source, target)
            commands = rec.finish()
            device.submit(commands).wait()
            commands.destroy()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.destroy()

    def time(self, ctx: LowerContext, *, launches: int | None = None, repetitions: int = 5, node: Node | None = None) -> Timing:
        """Time the node as `ctx` lowers it. launches: how many in one recording (default: whole rounds through the copies,
        on a GPU enough of them for about a millisecond, so that clocks and timestamps are steady)."""
        dispatches = OPS[(node or self.problem.node).op].lower(node or self.problem.node, ctx)
        per_launch = sum(d.nbytes for d in dispatches)
        enough = 16 if self.device.caps.device_type == "cpu" else min(2000, STEADY_BYTES // per_launch)
        count = launches or max(1, -(-enough // self.copies)) * self.copies
        kernels = compile_kernels(self.device, self.library, dispatches)
        figures = []
        for barrier in (False, True):
            rec = self.device.recorder("timing", timestamps=2)
            rec.barrier()
            rec.timestamp("start")
            for i in range(count):
                if barrier and i:
                    rec.barrier()
                for d in dispatches:
                    rec.dispatch(kernels[d.kernel, len(d.args), len(d.push)], [self._bind(d, a, i) for a in range(len(d.args))], d.push, d.groups)
            rec.timestamp("end")
            commands = rec.finish()
            warm_up(self.device, commands)
            times = []
            for _ in range(repetitions):
                self.device.submit(commands).wait()
                (_, start), (_, end) = commands.timestamps()
                times.append((end - start) / 1e3 / count)
            commands.destroy()
            figures.append((float(np.median(times)), float(np.subtract(*np.percentile(times, [75, 25])) / 2)))
        (through, through_spread), (latency, latency_spread) = figures
        return Timing(through, through_spread, latency, latency_spread, sum(d.nbytes for d in dispatches))

    def _bind(self, dispatch: Dispatch, index: int, launch: int) -> BufferRange:
        arg = dispatch.args[index]
        heavy = self._weights[launch % self.copies].get(arg.tensor.name)
        if heavy is not None:
            return heavy[arg.shard]
        if arg.tensor.name not in self._ranges:
            self._ranges[arg.tensor.name] = self._arena.alloc(nbytes(arg.tensor), arg.tensor.name)
        return self._ranges[arg.tensor.name]

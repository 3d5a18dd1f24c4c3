"""Stages of a schedule on a device: what one costs beside its bytes, and what each of a model's takes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vkback.device import BufferRange, Capabilities, Device
from vkback.device.capabilities import PROFILE_DIR
from vkback.engine.weights import load_weights
from vkback.errors import VkbackError
from vkback.events import Report
from vkback.graph import Tensor
from vkback.models.registry import Model
from vkback.ops.dispatch import pack_push
from vkback.ops.storage import nbytes
from vkback.plan.cost.forecast import Costs
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program, WeightRanges
from vkback.shader import ShaderLibrary, Variant
from vkback.timing.launches import span_us, warm_up
from vkback.timing.read_rate import UNROLL, measure_read_rate

STAGE_BYTES, SOFTWARE_STAGE_BYTES = 1 << 20, 1 << 14
"""What a stage of the probe reads: little enough that its fixed cost shows, on a GPU enough to occupy every core."""

PEAK_SHARE = 0.95
"""Of a vendor's peak bandwidth, what a device reads: 4544 of 4800 GB/s on an H200."""
PROFILE_STAGE_US = 3.0
"""Of a stage of a device that is not here: launch, barrier and memory's way to full speed, 2.7 to 3.1 us on an H200."""
BARRIER_FREE_SHARE = 1 / 3
"""Of a stage's cost, what a barrier-free one takes (docs/barrier_free.md). On an H200 a token of llama 1B Q4_K_S with 80 barrier-free
stages took 150 us less (1830 -> 2520 t/s), one of 8B with 160 took 337 us less (556 -> 684): 1.9 and 2.1 of a stage's 3.0 us. No
other device was measured."""
UNKNOWN_GB_S = {"discrete": 400.0, "integrated": 60.0, "cpu": 20.0}
"""Read rate of a profile that names no peak, by type of device: the middle of what is sold."""

REPEAT = 8
"""Runs of the schedule in one recording, for the time of the whole: a submit and its wait are then little beside it."""


class StageError(VkbackError):
    """A schedule that cannot be measured as asked."""


@dataclass(frozen=True)
class StageTimes:
    """Microseconds, medians. stages: each by GPU timestamps, with barriers before all; whole: one run without them, by the clock."""

    stages: tuple[float, ...]
    whole: float


def profile_costs(profile: str | None, caps: Capabilities) -> Costs:
    """Stated costs of a recorded device: from its published peak bandwidth, or a guess that says so.

    profile  a file or an id; None for a device that only compiles
    """
    file, peak = Path(profile or ""), None
    if profile:
        text = (file if file.suffix or file.exists() else PROFILE_DIR / f"{profile}.json").read_text(encoding="utf-8")
        peak = json.loads(text).get("peak_bandwidth_gb_s")
    if peak:
        rate, why = PEAK_SHARE * peak, f"{PEAK_SHARE:.0%} of the published {peak:g} GB/s"
    else:
        rate = UNKNOWN_GB_S.get(caps.device_type, UNKNOWN_GB_S["integrated"])
        why = f"a guess for a device of type {caps.device_type}, whose peak is not known"
    return Costs(rate, PROFILE_STAGE_US, BARRIER_FREE_SHARE * PROFILE_STAGE_US, f"{why}; {PROFILE_STAGE_US:g} us a stage as an H200 takes")


def device_costs(device: Device, library: ShaderLibrary) -> Costs:
    """Costs measured on the device now."""
    rate = measure_read_rate(device, library)
    stage = measure_stage_us(device, library, rate.bytes_per_second)
    return Costs(rate.gb_s, stage, BARRIER_FREE_SHARE * stage, "both just measured")


def measure_stage_us(device: Device, library: ShaderLibrary, bytes_per_second: float) -> float:
    """Microseconds that a chain of launches with a barrier between takes for each, beside the bytes, which lie in no cache."""
    software = device.caps.device_type == "cpu"
    size = SOFTWARE_STAGE_BYTES if software else STAGE_BYTES
    stages = 64 if software else 512
    places = 64 if software else 256
    threads = min(8 if software else 256, device.caps.max_workgroup_invocations)
    tile = 16 * UNROLL * threads
    variant = Variant.of("probe/read.comp", {"UNROLL": UNROLL, "WG": threads})
    kernel = device.kernel(library.spirv(variant), name=variant.name, bindings=2, push_bytes=8)
    with device.arena("stage cost", places * size + 4096, "device") as arena:
        source, sink = arena.alloc(places * size, "source"), arena.alloc(256, "sink")
        rec = device.recorder("stage cost", timestamps=2)
        rec.fill(source, 0)
        rec.barrier()
        rec.timestamp("start")
        for i in range(stages):
            rec.barrier()
            part = source.slice(i % places * size, size)
            rec.dispatch(kernel, [part, sink], pack_push(size // tile, 1), (8 if software else 264, 1, 1), "read")
        rec.barrier()
        rec.timestamp("end")
        commands = rec.finish()
        warm_up(device, commands, 0.05)
        times = [span_us(device, commands) / stages for _ in range(5)]
        commands.destroy()
    return max(0.0, float(np.median(times)) - 1e6 * size / bytes_per_second)


def measure_stages(
    model: Model,
    device: Device,
    library: ShaderLibrary,
    schedule: Schedule,
    *,
    depth: int = 0,
    repetitions: int = 5,
    progress: Report | None = None,
) -> StageTimes:
    """Load what a schedule of a model reads and time it, with `depth` rows of the cache in use and zeros in them.

    Raises StageError when tokens and depth exceed the cache, and whatever loading raises.
    """
    tensors = schedule.tensors()
    caches = [t for t in tensors.values() if t.kind == "state"]
    tokens = tensors["pos"].elements
    rows = min((t.shape[1] for t in caches), default=depth + tokens)
    if depth + tokens > rows:
        raise StageError(f"[stages] {tokens} tokens after {depth} do not fit a cache of {rows} rows; lower --depth or raise --ctx")
    with ExitStack() as stack:
        weights, ranges = loaded(model, tensors, device, stack, progress=progress)
        device.upload(ranges["pos"], np.arange(depth, depth + tokens, dtype=np.int32))
        program = Program(device, library, schedule, ranges, weights)
        stack.callback(program.close)
        stamped = program.record("stages", timestamps=True)
        whole = program.record("stages together", repeat=REPEAT)
        warm_up(device, stamped, 0.3)
        stages, wholes = [], []
        for _ in range(repetitions):
            device.submit(stamped).wait()
            marks = [ns for _, ns in stamped.timestamps()]
            stages.append(np.diff(marks) / 1e3)
            begun = time.perf_counter_ns()
            device.submit(whole).wait()
            wholes.append((time.perf_counter_ns() - begun) / 1e3 / REPEAT)
    return StageTimes(tuple(map(float, np.median(stages, axis=0))), float(np.median(wholes)))


def loaded(
    model: Model, tensors: Mapping[str, Tensor], device: Device, stack: ExitStack, *, progress: Report | None = None
) -> tuple[dict[str, WeightRanges], dict[str, BufferRange]]:
    """What a schedule of a model needs on a device until the stack unwinds: its weights, and its caches and inputs, all zeros."""
    arena, weights, *_ = load_weights(model.file, {n: t for n, t in tensors.items() if t.kind == "weight"}, device, progress=progress)
    stack.callback(arena.destroy)
    return weights, zeroed(device, [t for t in tensors.values() if t.kind in ("state", "input")], stack)


def zeroed(device: Device, tensors: Sequence[Tensor], stack: ExitStack) -> dict[str, BufferRange]:
    """Memory for tensors, all zeros."""
    sizes = {t.name: aligned(nbytes(t)) for t in tensors}
    arena = stack.enter_context(device.arena("inputs and caches", sum(sizes.values()), "device"))
    ranges = {name: arena.alloc(size, name) for name, size in sizes.items()}
    rec = device.recorder("zeros")
    for block in ranges.values():
        rec.fill(block, 0)
    device.run(rec)
    return ranges

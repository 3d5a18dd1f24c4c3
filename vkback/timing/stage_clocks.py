"""When the workgroups of a token's stages start, get their input and end, by the clock that their kernels read (shaders/common/clock.glsl).

Barrier-free stages overlap, so that a timestamp between them says little. Kernels that can be barrier-free store the device's clock
themselves, at the cost of a few stores a workgroup.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.graph import Tensor
from vkback.ops.case import Array
from vkback.ops.dispatch import Arg, Dispatch
from vkback.plan.schedule import Schedule
from vkback.timing.launches import WARM_S, warm_up
from vkback.timing.token_program import TokenProgram, Tokens

POINTS = ("begin", "there", "done", "end")
"""The marks of shaders/common/clock.glsl: started, all spin-waits done, sums made, results stored."""

WORKGROUPS = ("first", "median", "last")

CLOCKED = frozenset(
    {
        "attention/decode/attention.comp",
        "gemv/gemv.comp",
        "norm/norm.comp",
        "quantize/quantize.comp",
        "rope/rope.comp",
        "rows/set_rows.comp",
    }
)
"""Kernels that have marks. Products of several tokens have none: their modules would need the clock's extension to be loaded at all."""

COVERED = 0.9
"""Of the barrier-free stages so many have marks where the clocks tell where the time goes."""

CALIBRATION_S = 0.05
"""Time between two runs by which the clock's tick is found: the end of a run is known to a few microseconds."""


class ClockError(VkbackError):
    """A device whose kernels cannot read its clock."""


@dataclass(frozen=True)
class StageClock:
    """One stage of one token.

    us  microseconds since the stage with clocks before it had ended, POINTS x WORKGROUPS; NaN for points its kernels do not pass
    """

    stage: int
    labels: tuple[str, ...]
    workgroups: int
    us: Array

    @property
    def took_us(self) -> float:
        """From the end of the stage before to its own."""
        return float(self.us[POINTS.index("end"), WORKGROUPS.index("last")])


def with_clocks(schedule: Schedule, max_bindings: int) -> Schedule:
    """The schedule with marks in all kernels that can be barrier-free and have some, as far as the device binds one more buffer."""
    stages = [[_marked(d, f"clocks {i}.{j}", max_bindings) for j, d in enumerate(stage)] for i, stage in enumerate(schedule.stages)]
    return dataclasses.replace(schedule, stages=stages)


def _marked(d: Dispatch, name: str, max_bindings: int) -> Dispatch:
    if not _can_mark(d, max_bindings):
        return d
    defines = {**dict(d.kernel.defines), "CLOCKS": 1, "BIND_CLOCKS": len(d.args)}
    kernel = dataclasses.replace(d.kernel, defines=tuple(sorted(defines.items())))
    marks = Tensor(name, "I32", (prod(d.groups), len(POINTS)), "counter")
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, Arg(marks, "w")))


def _can_mark(d: Dispatch, max_bindings: int) -> bool:
    return d.waits is not None and d.kernel.source in CLOCKED and len(d.args) < max_bindings


def clocks_cover(schedule: Schedule, max_bindings: int) -> bool:
    """Whether most barrier-free stages of a schedule have kernels with marks."""
    free = [stage for i, stage in enumerate(schedule.stages) if i in schedule.barrier_free]
    return sum(any(_can_mark(d, max_bindings) for d in stage) for stage in free) >= COVERED * len(free) > 0


def measure_clocks(tokens: Tokens, schedule: Schedule) -> list[StageClock]:
    """The stages of a token whose kernels have marks, in their order, at the clocks the device reaches under load.

    Raises ClockError where kernels cannot read the clock.
    """
    device = tokens.device
    if not device.caps.shader_clock:
        raise ClockError(f"[clocks] {device.caps.name}: kernels cannot read the device's clock (VK_KHR_shader_clock, shaderDeviceClock)")
    marked = with_clocks(schedule, device.caps.max_storage_bindings)
    with TokenProgram(tokens, marked) as program:
        (first, begun), (second, ended) = (_run(device, tokens, program, marked) for _ in range(2))
    us_a_tick = (ended - begun) / 1e3 / ticks_between(first, second)
    return stages_of(marked, second, us_a_tick)


def _run(device: Device, tokens: Tokens, program: TokenProgram, schedule: Schedule) -> tuple[dict[int, Array], float]:
    """Ticks of one run's last token by stage, [workgroups, points], and when it had ended, in ns of the device's timestamps."""
    time.sleep(CALIBRATION_S)
    warm_up(device, program.commands, WARM_S)
    device.submit([program.commands, tokens.end]).wait()
    ((_, ended),) = tokens.end.timestamps()
    return read_marks(schedule, lambda name: program.download(name, np.uint32)), float(ended)


def mark_names(schedule: Schedule) -> list[str]:
    """Tensors that hold the marks of a schedule's kernels."""
    return [d.args[-1].tensor.name for d in schedule.dispatches() if "CLOCKS" in dict(d.kernel.defines)]


def read_marks(schedule: Schedule, download: Callable[[str], Array]) -> dict[int, Array]:
    """Ticks of the last run of a schedule with marks, by stage: uint32 [workgroups, points]. download: a tensor's words by name."""
    found = {}
    for i, stage in enumerate(schedule.stages):
        names = [d.args[-1].tensor.name for d in stage if "CLOCKS" in dict(d.kernel.defines)]
        if names:
            found[i] = np.concatenate([download(name).reshape(-1, len(POINTS)) for name in names])
    return found


def ticks_between(first: dict[int, Array], second: dict[int, Array]) -> int:
    """From the last mark of one run to that of another."""
    return int((_last(second) - _last(first))[0])


def _last(ticks: dict[int, Array]) -> Array:
    """The mark of a run's end, one element, so that differences wrap as the clock does."""
    marks = ticks[max(ticks)][:, POINTS.index("end")]
    marks = marks[marks > 0]
    return marks[:1] + np.max((marks - marks[:1]).view(np.int32)).astype(np.uint32)


def stages_of(schedule: Schedule, ticks: dict[int, Array], us_a_tick: float) -> list[StageClock]:
    """The stages with marks, from the second on."""
    end = _last(ticks)
    found = []
    before: float | None = None
    for i, marks in ticks.items():
        since = np.where(marks > 0, (marks - end).view(np.int32) * us_a_tick, np.nan)
        last = float(np.nanmax(since[:, POINTS.index("end")]))
        if before is not None:
            us = np.full((len(POINTS), len(WORKGROUPS)), np.nan)
            for p, column in enumerate(since.T):
                if np.isfinite(column).any():
                    us[p] = np.nanpercentile(column, (0, 50, 100)) - before
            ended = int(np.isfinite(since[:, POINTS.index("end")]).sum())
            found.append(StageClock(i, tuple(d.label for d in schedule.stages[i]), ended, us))
        before = last
    return found

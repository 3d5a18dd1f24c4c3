"""Predicts the time of a schedule, from its bytes, the device's read rate and a fixed cost per stage; lists what each stage waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vkback.device import Capabilities
from vkback.ops.dispatch import Dispatch
from vkback.ops.storage import nbytes
from vkback.plan.schedule import Schedule, overlap
from vkback.plan.sync import ARRIVALS, STATE
from vkback.tuning.lookup import Tuning


@dataclass(frozen=True)
class Costs:
    """What work costs on a device, and where the figures come from.

    read_gb_s        memory read rate, 10^9 bytes per second
    stage_us         microseconds of a stage beyond its bytes, including the barrier before it
    barrier_free_us  the same for a barrier-free stage
    gflops           10^9 operations per second, multiply-adds count 2; infinite where only bytes are counted
    """

    read_gb_s: float
    stage_us: float
    barrier_free_us: float
    source: str
    gflops: float = math.inf


@dataclass(frozen=True)
class Wait:
    """A stage must run after an earlier one, which writes `tensor` ("write") or reads it before it is overwritten here ("read").

    spins  "whole" or "part" if the kernels of a barrier-free stage spin on it; "" if a barrier orders it, or it happened before
    """

    stage: int
    tensor: str
    after: str
    spins: str = ""


def moved_bytes(dispatch: Dispatch, rows: int) -> int:
    """Bytes that a dispatch moves if the first `rows` rows of each cache [heads, n_ctx, head_dim] are in use."""
    caches = [a.tensor for a in dispatch.args if a.tensor.kind == "state" and "r" in a.access and len(a.tensor.shape) == 3]
    whole = sum(map(nbytes, caches))
    if dispatch.nbytes < whole:  # a window, or a launch that reads none of the cache
        return dispatch.nbytes
    return dispatch.nbytes - whole + sum(nbytes(t) * min(rows, t.shape[1]) // t.shape[1] for t in caches)


def predicted_us(stage: Sequence[Dispatch], costs: Costs, rows: int, barrier_free: bool = False) -> float:
    """Microseconds of one stage."""
    return (costs.barrier_free_us if barrier_free else costs.stage_us) + sum(moved_bytes(d, rows) for d in stage) / costs.read_gb_s / 1e3


LOW_STAGE_US = 10.0


def low_costs(caps: Capabilities) -> Costs:
    """Costs for a device that was not measured, on the high side: for limits on the length of a submit."""
    low = Tuning.for_device(caps).pick("low_rates", device_type=caps.device_type)
    gib = max((heap.size for heap in caps.heaps if heap.device_local), default=0) / 2**30
    rate, gflops = (
        max(float(low[key]), 0.0 if low[f"{key}_per_gib"] == "none" else low[f"{key}_per_gib"] * gib) for key in ("gb_s", "gflops")
    )
    return Costs(rate, LOW_STAGE_US, LOW_STAGE_US, f"a low guess for a device of type {caps.device_type}", gflops)


def dispatch_us(dispatch: Dispatch, costs: Costs) -> float:
    """Microseconds of one dispatch by itself, all rows of the cache in use."""
    return max(dispatch.nbytes / costs.read_gb_s, dispatch.flops / costs.gflops) / 1e3


def cuts(schedule: Schedule, costs: Costs, limit_us: float) -> dict[int, float]:
    """Splits a schedule into submits, none longer than `limit_us` unless a single dispatch is: the number of the dispatch, in the
    schedule's order, with which each begins, and its microseconds. Dispatches of one stage do not depend on each other,
    so a cut may lie between them."""
    submits = {0: 0.0}
    begin = number = 0
    for stage in schedule.stages:
        for i, d in enumerate(stage):
            own = dispatch_us(d, costs) + (costs.stage_us if i == 0 else 0.0)
            if number > begin and submits[begin] + own > limit_us:
                begin = number
                submits[begin] = 0.0
            submits[begin] += own
            number += 1
    return submits


def repeats(schedule: Schedule, costs: Costs, limit_us: float, most: int) -> int:
    """How often a schedule goes into one submit of `limit_us`: `most`, or as many halvings of it as are needed; once at least."""
    whole_us = sum(cuts(schedule, costs, math.inf).values())
    while most > 1 and most * whole_us > limit_us:
        most //= 2
    return most


def waits(schedule: Schedule) -> list[list[Wait]]:
    """What each stage waits for: each tensor once, the nearest stage first. Weights, and inputs that no node writes, are not waited for."""
    touched: dict[str, list[tuple[int, str, str]]] = {}
    found: list[list[Wait]] = []
    for number, stage in enumerate(schedule.stages):
        here = [*((r, "read") for d in stage for r in d.reads), *((w, "write") for d in stage for w in d.writes)]
        here = [(r, how) for r, how in here if r[0] != STATE.name and not r[0].endswith(ARRIVALS)]
        spun_on = _spun_on(stage) if number in schedule.barrier_free else {}
        nearest: dict[str, Wait] = {}
        for (name, part), how in here:
            for earlier, other, after in touched.get(name, []):
                before = nearest.get(name)
                if overlap(part, other) and "write" in (how, after) and (before is None or (before.stage, before.after) < (earlier, after)):
                    nearest[name] = Wait(earlier, name, after, spun_on.get(name, ""))
        found.append(sorted(nearest.values(), key=lambda w: (-w.stage, w.tensor)))
        for (name, part), how in here:
            touched.setdefault(name, []).append((number, part, how))
    return found


def _spun_on(stage: Sequence[Dispatch]) -> dict[str, str]:
    """Names of the tensors that a barrier-free stage spins on, and how much of them."""
    whole = {name: "whole" for d in stage if d.waits for name in (*d.waits.whole, *d.waits.counted)}
    return {name: "part" for d in stage if d.waits for name in (*d.waits.part, *d.waits.shares)} | whole

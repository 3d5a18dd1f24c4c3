"""Predicts the time of a schedule, from its bytes, the device's read rate and a fixed cost a stage; and lists what each stage waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkback.ops.base import Dispatch, nbytes
from vkback.plan.schedule import Schedule, overlap
from vkback.plan.sync import STATE


@dataclass(frozen=True)
class Costs:
    """What a device takes, and whence that is known.

    read_gb_s        memory read rate, 10^9 bytes a second
    stage_us         microseconds of a stage beside its bytes, a barrier before it
    barrier_free_us  the same of a barrier-free stage
    """

    read_gb_s: float
    stage_us: float
    barrier_free_us: float
    source: str


@dataclass(frozen=True)
class Wait:
    """A stage must run after an earlier one, which has `tensor` written ("write"), or read before it is overwritten here ("read").

    spins  "whole" or "part" where the kernels of a barrier-free stage spin on it; "" where a barrier orders it, or it happened before
    """

    stage: int
    tensor: str
    after: str
    spins: str = ""


def moved_bytes(dispatch: Dispatch, rows: int) -> int:
    """Bytes that a dispatch moves when the first `rows` rows of each cache [heads, n_ctx, head_dim] are in use."""
    caches = [a.tensor for a in dispatch.args if a.tensor.kind == "state" and len(a.tensor.shape) == 3]
    whole = sum(map(nbytes, caches))
    if dispatch.nbytes < whole:  # a window, or a launch that stores into the cache and reads none of it
        return dispatch.nbytes
    return dispatch.nbytes - whole + sum(nbytes(t) * min(rows, t.shape[1]) // t.shape[1] for t in caches)


def predicted_us(stage: Sequence[Dispatch], costs: Costs, rows: int, barrier_free: bool = False) -> float:
    """Microseconds of one stage."""
    return (costs.barrier_free_us if barrier_free else costs.stage_us) + sum(moved_bytes(d, rows) for d in stage) / costs.read_gb_s / 1e3


def waits(schedule: Schedule) -> list[list[Wait]]:
    """What each stage waits for, a tensor once, the nearest stage first; weights and inputs that nobody writes are not waited for."""
    touched: dict[str, list[tuple[int, str, str]]] = {}
    found: list[list[Wait]] = []
    for number, stage in enumerate(schedule.stages):
        here = [*((r, "read") for d in stage for r in d.reads), *((w, "write") for d in stage for w in d.writes)]
        here = [(r, how) for r, how in here if r[0] != STATE.name]
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
    whole = {name: "whole" for d in stage if d.waits for name in d.waits.whole}
    return {name: "part" for d in stage if d.waits for name in d.waits.part} | whole

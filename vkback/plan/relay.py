"""Stages that hand over by counters in memory instead of pipeline barriers; shaders/common/relay.glsl has the protocol.

Every stage of a chain counts its finished workgroups in a word of its own; the next stage's workgroups wait for the last. Since a stage is
finished only after it has waited for the one before, everything earlier is finished, too: the order is that of barriers. The words are put
back to zero before the schedule runs again.
"""

from __future__ import annotations

import dataclasses
import os
from math import prod

from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch, pack_push
from vkback.plan.schedule import Schedule
from vkback.shader import Variant

RELAY = "relay"
"""Name of the tensor of counters."""

LINE_WORDS = 64
"""Words from one counter to the next: a cache line of its own, and a legal offset of a buffer range."""


def relayed(schedule: Schedule) -> Schedule:
    """The schedule with as few barriers as its kernels allow."""
    able = [bool(stage) and all(d.relay for d in stage) for stage in schedule.stages]
    joined = [False, *(a and b for a, b in zip(able, able[1:], strict=False))]
    if not any(joined):
        return schedule
    counters = Tensor(RELAY, "I32", ((1 + len(able)) * LINE_WORDS,), "counter")
    stages = []
    for i, stage in enumerate(schedule.stages):
        last = i + 1 == len(able)
        if not joined[i] and (last or not joined[i + 1]):
            stages.append(stage)
            continue
        before = sum(prod(d.groups) for d in schedule.stages[i - 1]) if joined[i] else 0
        words = (i * LINE_WORDS, before, 0 if last or not joined[i + 1] else (i + 1) * LINE_WORDS)
        stages.append([_in_relay(d, counters, words) for d in stage])
    return dataclasses.replace(schedule, stages=stages, joined=frozenset(i for i, j in enumerate(joined) if j))


def _in_relay(d: Dispatch, counters: Tensor, words: tuple[int, int, int]) -> Dispatch:
    """words: to wait for, its final count, to count up."""
    defines = tuple(sorted({**dict(d.kernel.defines), "RELAY": 1, "RELAY_MODE": int(os.environ["RELAY"]) - 1, "BIND_RELAY": len(d.args)}.items()))
    kernel = dataclasses.replace(d.kernel, defines=defines)
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, Arg(counters, "rw")), push=d.push + pack_push(*words))

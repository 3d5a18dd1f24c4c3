"""Stages that hand over by counters in memory instead of pipeline barriers (shaders/common/handover.glsl).

Every workgroup of a joined stage counts up a word of its stage when it has written its results; those of the next stage wait for the full
count. Since each waits before it writes, and before it reads what changes within a token, a stage is finished only after all before it are: the
order is that of barriers, and so are the bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod

from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch, pack_push
from vkback.plan.schedule import Schedule

HANDOVER = "handover"
"""Name of the tensor of counters. Word 0 is not zero once a wait was given up."""

STAGE_WORDS = 64
"""Counters of a stage: word 0 of them for all, word SOON for what some of its workgroups have written early. Each has a cache line of its own."""

SOON = 32


def with_handovers(schedule: Schedule) -> Schedule:
    """The schedule with as few barriers as its kernels allow."""
    able = [bool(stage) and all(d.handover is not None for d in stage) for stage in schedule.stages]
    # The counters are put to zero beside stage 0, which must therefore not count.
    joined = [i > 1 and able[i - 1] and able[i] for i in range(len(able))]
    counters = Tensor(HANDOVER, "I32", ((1 + len(able)) * STAGE_WORDS,), "counter")
    stages = []
    for i, stage in enumerate(schedule.stages):
        counts = i + 1 < len(able) and joined[i + 1]
        if not joined[i] and not counts:
            stages.append(stage)
            continue
        before = (_word(i - 1), _workgroups(schedule.stages[i - 1])) if joined[i] else (0, 0)
        done = (_word(i), _word(i) + SOON) if counts else (0, 0)
        stages.append([_taking_part(d, counters, (*_first(schedule.stages, joined, i, d), *before, *done)) for d in stage])
    return dataclasses.replace(schedule, stages=stages, joined=frozenset(i for i, j in enumerate(joined) if j))


def _word(stage: int) -> int:
    return (1 + stage) * STAGE_WORDS


def _workgroups(stage: Sequence[Dispatch]) -> int:
    return sum(prod(d.groups) for d in stage)


def _first(stages: Sequence[Sequence[Dispatch]], joined: Sequence[bool], i: int, d: Dispatch) -> tuple[int, int]:
    """Word and count to wait for before a dispatch of stage i reads what it needs first; (0, 0) where a barrier has seen to it."""
    assert d.handover is not None
    wanted = set(d.handover.first)
    j = i
    while joined[j]:
        j -= 1
        writers = [w for w in stages[j] if wanted & {name for name, _ in w.writes}]
        if writers:
            soon = all(w.handover is not None and wanted & {n for n, _ in w.writes} <= set(w.handover.soon) for w in writers)
            return (_word(j) + SOON, len(writers)) if soon else (_word(j), _workgroups(stages[j]))
    return (0, 0)


def _taking_part(d: Dispatch, counters: Tensor, words: tuple[int, ...]) -> Dispatch:
    """words: first, its count, before, its count, done, soon."""
    defines = tuple(sorted({**dict(d.kernel.defines), "HANDOVER": 1, "BIND_HANDOVER": len(d.args)}.items()))
    kernel = dataclasses.replace(d.kernel, defines=defines)
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, Arg(counters, "rw")), push=d.push + pack_push(*words))

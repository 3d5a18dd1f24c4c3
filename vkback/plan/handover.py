"""Stages that hand over word by word instead of by pipeline barriers (shaders/common/handover.glsl).

A kernel of a joined stage reads what it awaits until no word of it is EMPTY any more. For that to be as good as a barrier, three things
must hold, and a stage for which one does not keeps its barrier:

- What a stage hands over is written once a run, into memory of its own, which the program fills with EMPTY before.
- Whatever else a joined kernel reads was complete before something that it awaits could be written: the stage before awaited all of it, or
  the one before that.
- Nothing is written that an earlier stage might still read. Memory of its own sees to that, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch
from vkback.plan.schedule import Schedule

STATE = Tensor("handover", "I32", (1,), "counter")
"""Not zero once a wait was given up."""

EMPTY = 0x80808080
"""EMPTY of shaders/common/handover.glsl."""


def with_handovers(schedule: Schedule, max_bindings: int) -> Schedule:
    """The schedule with as few barriers as its kernels allow. A kernel that waits binds one buffer more, of max_bindings at most."""
    joined = _joined(schedule.stages, max_bindings)
    stages = []
    for i, stage in enumerate(schedule.stages):
        gives = i + 1 < len(joined) and joined[i + 1]
        stages.append([_taking_part(d, joined[i]) if joined[i] or gives else d for d in stage])
    awaited = {name for i, stage in enumerate(schedule.stages) if joined[i] for d in stage for name in _awaited(d)}
    made = {name for i, stage in enumerate(schedule.stages) if i + 1 < len(joined) and joined[i + 1] for name in _written(stage)}
    handed = frozenset(awaited & made)
    return dataclasses.replace(schedule, stages=stages, joined=frozenset(i for i, j in enumerate(joined) if j), handed=handed)


def _written(stage: Sequence[Dispatch]) -> set[str]:
    """Names of the tensors that a stage makes."""
    return {a.tensor.name for d in stage for a in d.args if "w" in a.access and a.tensor.kind == "node"}


def _awaited(d: Dispatch) -> tuple[str, ...]:
    return (*d.handover.whole, *d.handover.part) if d.handover else ()


def _joined(stages: Sequence[Sequence[Dispatch]], max_bindings: int) -> list[bool]:
    """For each stage whether it can do without a barrier before it."""
    joined = [False] * len(stages)
    # Since the last barrier: by tensor written, what was complete before any of it could be.
    implied: dict[str, frozenset[str]] = {}
    for i, stage in enumerate(stages):
        # Memory is filled with EMPTY beside stage 0, which must therefore hand nothing over.
        able = i > 1 and all(d.handover is not None for d in (*stages[i - 1], *stage))
        able = able and all(len(d.args) < max_bindings for d in stage) and not _written(stage) & implied.keys()
        joined[i] = able and all(_covered(d, implied) for d in stage)
        if not joined[i]:
            implied = {}
        for name, before in [(name, _complete_before(d, implied)) for d in stage for name in _written([d])]:
            # Of a tensor made by several dispatches a reader may have awaited the words of one alone.
            implied[name] = implied[name] & before if name in implied else before
    return joined


def _covered(d: Dispatch, implied: Mapping[str, frozenset[str]]) -> bool:
    """Whether all that a dispatch reads is awaited or was complete before."""
    assert d.handover is not None
    sure = _complete_before(d, implied).union(d.handover.part)
    return all(name in sure for name, _ in d.reads if name in implied)


def _complete_before(d: Dispatch, implied: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Tensors that are complete before a dispatch writes anything."""
    if d.handover is None:
        return frozenset()
    return frozenset(d.handover.whole).union(*(implied.get(name, frozenset()) for name in _awaited(d)))


def _taking_part(d: Dispatch, awaits: bool) -> Dispatch:
    defines = {**dict(d.kernel.defines), "HANDOVER": 1, "AWAITS": int(awaits)} | ({"BIND_HANDOVER": len(d.args)} if awaits else {})
    kernel = dataclasses.replace(d.kernel, defines=tuple(sorted(defines.items())))
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, *([Arg(STATE, "rw")] if awaits else [])))

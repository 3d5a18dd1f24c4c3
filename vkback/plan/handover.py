"""Stages that hand over word by word instead of by pipeline barriers (shaders/common/handover.glsl).

A kernel of a joined stage reads what it awaits until no word of it is EMPTY any more. For that to be an order as strict as that of
barriers, three things must hold, and a stage for which one does not keeps its barrier:

- What a stage hands over is written once a run, into memory of its own, which the program fills with EMPTY before.
- Whatever else a joined kernel reads was complete before something that it awaits could be written: the stage before awaited all of it, or
  the one before that.
- Nothing is written that an earlier stage might still read. Memory of its own sees to that, too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch
from vkback.plan.schedule import Schedule

STATE = Tensor("handover", "I32", (1,), "counter")
"""Not zero once a wait was given up."""

EMPTY = 0x80808080
"""EMPTY of shaders/common/handover.glsl."""


def with_handovers(schedule: Schedule, max_bindings: int) -> Schedule:
    """The schedule with as few barriers as its kernels allow, of which one that awaits binds a buffer more."""
    joined = _joined(schedule.stages, max_bindings)
    stages = []
    for i, stage in enumerate(schedule.stages):
        gives = i + 1 < len(joined) and joined[i + 1]
        stages.append([taking_part(d, joined[i]) if joined[i] or gives else d for d in stage])
    awaiting = [d.handover for awaits, stage in zip(joined, schedule.stages, strict=True) if awaits for d in stage if d.handover]
    handed = frozenset(name for h in awaiting for name in (*h.whole, *h.part, *h.own))
    return dataclasses.replace(schedule, stages=stages, joined=frozenset(i for i, j in enumerate(joined) if j), handed=handed)


def _written(stage: Sequence[Dispatch]) -> set[str]:
    """Names of the tensors that a stage makes."""
    return {a.tensor.name for d in stage for a in d.args if "w" in a.access and a.tensor.kind == "node"}


def _awaited(d: Dispatch) -> tuple[str, ...]:
    """Names of the tensors whose words a dispatch waits for."""
    assert d.handover is not None
    return (*d.handover.whole, *d.handover.part)


def _joined(stages: Sequence[Sequence[Dispatch]], max_bindings: int) -> list[bool]:
    """For each stage whether it can do without a barrier before it."""
    joined = [False] * len(stages)
    writers = Counter(name for stage in stages for name in _written(stage))
    made: dict[str, list[set[str]]] = {}  # since the last barrier, for each dispatch that makes a tensor what is complete by then
    for i, stage in enumerate(stages):
        # Memory is filled with EMPTY beside stage 0, which must therefore hand nothing over.
        able = i > 1 and all(d.handover is not None for d in (*stages[i - 1], *stage))
        able = able and all(len(d.args) < max_bindings for d in stage)
        once = all(writers[name] == 1 for s in stages[max(i - 1, 0) : i + 1] for name in _written(s))
        joined[i] = able and once and all(_covered(d, made) for d in stage)
        if not joined[i]:
            made = {}
        complete = [(d, _complete(d, made)) for d in stage]
        for d, names in complete:
            for name in _written([d]):
                made.setdefault(name, []).append(names)
    return joined


def _covered(d: Dispatch, made: Mapping[str, Sequence[set[str]]]) -> bool:
    """Whether all that a dispatch reads is awaited or was complete before, and all that it awaits is handed over."""
    awaited = set(_awaited(d))
    there = awaited | _complete(d, made)
    return awaited <= made.keys() and all(name in there for name, _ in d.reads if name in made)


def _complete(d: Dispatch, made: Mapping[str, Sequence[set[str]]]) -> set[str]:
    """Tensors that are complete once a dispatch has got what it awaits."""
    if d.handover is None:
        return set()
    # A tensor may be made by several dispatches. A part of it may come from any of them, the whole comes from all.
    of_wholes = [set.union(*made[t]) for t in d.handover.whole if t in made]
    of_parts = [set.intersection(*made[t]) for t in d.handover.part if t in made]
    return set(d.handover.whole).union(*of_wholes, *of_parts)


def taking_part(d: Dispatch, awaits: bool) -> Dispatch:
    """A dispatch as one that hands over, and awaits what the stage before does."""
    defines = {**dict(d.kernel.defines), "HANDOVER": 1, "AWAITS": int(awaits)} | ({"BIND_HANDOVER": len(d.args)} if awaits else {})
    kernel = dataclasses.replace(d.kernel, defines=tuple(sorted(defines.items())))
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, *([Arg(STATE, "rw")] if awaits else [])))

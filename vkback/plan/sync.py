"""Barrier-free stages: fine-grained producer-consumer synchronization by spin-wait on a sentinel value (shaders/common/sentinel.glsl).

Before a run the memory of every tensor that a barrier-free stage reads is filled with the word SENTINEL. Producers never store that word.
A consumer reads a word again and again until it is another: then the producer has written it. The two need no pipeline barrier.

A stage runs barrier-free only if a happens-before order holds for all that its kernels read:

1. A kernel that has seen a word of tensor T knows: the workgroup that stored the word has finished everything it waited for before it.
2. So the store *happens after* every tensor that its workgroup waited for as a whole, and, by induction, after all those happened after.
3. A tensor that several dispatches write: having seen all of it implies what any of its writers waited for, having seen a part of it only
   what all of them waited for.
4. A barrier orders everything before it.

Example: norm -> gate+up -> down. `down` spins on the whole output of `gate+up`, every workgroup of which had spun on the whole output
of `norm`. So `down` may read the output of `norm` without a spin-wait. Had `gate+up` waited for a part of it only, `down` would keep its
barrier.

Two more rules make the sentinel reliable: a tensor that is waited for is written once a run and has memory that no other tensor gets.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch
from vkback.plan.schedule import Schedule

STATE = Tensor("spin_timeout", "I32", (1,), "counter")
"""Not zero once a spin-wait has timed out."""

SENTINEL = 0x80808080
"""SENTINEL of shaders/common/sentinel.glsl."""


def without_barriers(schedule: Schedule, max_bindings: int) -> Schedule:
    """The schedule with as few barriers as its kernels allow. A kernel that spin-waits binds one buffer more."""
    free, resolved = _barrier_free(schedule.stages, max_bindings)
    stages = []
    for i, stage in enumerate(resolved):
        produces = i + 1 < len(free) and free[i + 1]
        stages.append([synchronized(d, free[i]) if free[i] or produces else d for d in stage])
    waits = [d.waits for spins, stage in zip(free, resolved, strict=True) if spins for d in stage if d.waits]
    tensors = frozenset(name for w in waits for name in (*w.whole, *w.part, *w.own))
    numbers = frozenset(i for i, spins in enumerate(free) if spins)
    return dataclasses.replace(schedule, stages=stages, barrier_free=numbers, sentinel_tensors=tensors)


def _written(stage: Sequence[Dispatch]) -> set[str]:
    """Names of the tensors that a stage makes."""
    return {a.tensor.name for d in stage for a in d.args if "w" in a.access and a.tensor.kind == "node"}


def _resolved(d: Dispatch, made: Mapping[str, Sequence[set[str]]]) -> Dispatch:
    """A dispatch that waits for `also` as for its other wholes, as far as these were made since the last barrier, or not at all."""
    if d.waits is None or not d.waits.also:
        return d
    since = tuple(name for name in d.waits.also if name in made)
    return dataclasses.replace(d, waits=dataclasses.replace(d.waits, whole=(*d.waits.whole, *since), also=since))


def _barrier_free(stages: Sequence[Sequence[Dispatch]], max_bindings: int) -> tuple[list[bool], list[list[Dispatch]]]:
    """For each stage whether it can run without a barrier before it; and the stages, their waits resolved."""
    found: list[list[Dispatch]] = []
    free = [False] * len(stages)
    writers = Counter(name for stage in stages for name in _written(stage))
    made: dict[str, list[set[str]]] = {}  # since the last barrier: per tensor, for each writer, what happens before its stores
    for i, planned in enumerate(stages):
        stage = [_resolved(d, made) for d in planned]
        found.append(stage)
        # Memory is filled with SENTINEL beside stage 0, so nobody can spin on what stage 0 writes.
        able = i > 1 and all(d.waits is not None for d in (*stages[i - 1], *stage))
        able = able and all(len(d.args) < max_bindings for d in stage)
        once = all(writers[name] == 1 for s in stages[max(i - 1, 0) : i + 1] for name in _written(s))
        free[i] = able and once and all(_ordered(d, made) for d in stage)
        if not free[i]:
            made = {}
        before = [(d, _happened_before(d, made)) for d in stage]
        for d, names in before:
            for name in _written([d]):
                made.setdefault(name, []).append(names)
    return free, found


def _ordered(d: Dispatch, made: Mapping[str, Sequence[set[str]]]) -> bool:
    """Whether a dispatch spins on, or happens after, all that it reads; and spins only on what was made since the last barrier."""
    assert d.waits is not None
    spun_on = {*d.waits.whole, *d.waits.part}
    complete = spun_on | _happened_before(d, made)
    return spun_on <= made.keys() and all(name in complete for name, _ in d.reads if name in made)


def _happened_before(d: Dispatch, made: Mapping[str, Sequence[set[str]]]) -> set[str]:
    """Tensors that are complete once the spin-waits of a dispatch have ended."""
    if d.waits is None:
        return set()
    # A tensor may have several writers. A part of it may come from any of them, the whole comes from all.
    of_wholes = [set.union(*made[t]) for t in d.waits.whole if t in made]
    of_parts = [set.intersection(*made[t]) for t in d.waits.part if t in made]
    return set(d.waits.whole).union(*of_wholes, *of_parts)


def synchronized(d: Dispatch, spins: bool) -> Dispatch:
    """A dispatch whose kernel avoids SENTINEL in what it stores, and with `spins` spin-waits on what it reads."""
    defines = {**dict(d.kernel.defines), "SYNC_SENTINEL": 1, "SPINS": int(spins)} | ({"BIND_SYNC_STATE": len(d.args)} if spins else {})
    if spins and d.waits is not None and d.waits.also:
        defines["SPINS_ALSO"] = 1
    kernel = dataclasses.replace(d.kernel, defines=tuple(sorted(defines.items())))
    return dataclasses.replace(d, kernel=kernel, args=(*d.args, *([Arg(STATE, "rw")] if spins else [])))

"""Barrier-free stages: fine-grained producer-consumer synchronization by spin-wait on a sentinel value (shaders/common/sentinel.glsl).

Before a run, the memory of every tensor that a barrier-free stage reads is filled with the word SENTINEL. Producers never store that word.
A consumer polls a word until it is a different one: then the producer has written it. The two need no pipeline barrier.

A stage can run barrier-free only if a happens-before order holds for everything that its kernels read:

1. A kernel that has seen a word of tensor T knows: the workgroup that stored the word had finished everything it waited for before.
2. So the store *happens after* every tensor that its workgroup waited for as a whole, and, by induction,
   after all that those happened after.
3. If several dispatches write a tensor: having seen all of it implies everything that any of its writers waited for; having seen a part of
   it, only what all of them waited for.
4. A barrier orders everything before it.

Example: norm -> gate+up -> down. `down` spins on the whole output of `gate+up`, every workgroup of which had spun on the whole output
of `norm`. So `down` may read the output of `norm` without a spin-wait. Had `gate+up` waited for only a part of it, `down` would keep its
barrier.

Two more rules make the sentinel reliable: a tensor that is waited for is written once per run, and no other tensor shares its memory.

Results that every workgroup reads repeatedly, or whose memory cannot be filled, are waited for by counted arrivals
(shaders/common/arrivals.glsl): each workgroup of the producing dispatch increments a counter, which starts as SENTINEL, once it has stored
everything. A kernel that has seen the full count knows that all workgroups of that dispatch have ended: all of its outputs are complete,
and so is everything that any of its workgroups waited for, and what all of them together waited for. If several dispatches of a stage make
what a consumer waits for, they share a counter. What is complete by the other waits is not waited for: rows of a cache that an earlier
layer wrote, and has read, must not share a counter with later ones, or the earlier layer would wait for these.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from vkback.graph import Tensor
from vkback.ops.dispatch import Arg, Dispatch
from vkback.plan.schedule import Schedule
from vkback.shader import interface

STATE = Tensor("spin_timeout", "I32", (1,), "counter")
"""Not zero once a spin-wait has timed out."""

ARRIVALS = ".arrivals"
"""Suffix of the name of a counter of arrivals, after the name of what is waited for."""

COUNTERS, COUNTER_WORDS = 16, 32
"""As in shaders/common/arrivals.glsl."""

SENTINEL = 0x80808080
"""SENTINEL of shaders/common/sentinel.glsl."""


def without_barriers(schedule: Schedule, max_bindings: int, crossing: Collection[str] = ()) -> Schedule:
    """The schedule with as few barriers as its kernels allow. A kernel that spin-waits binds one more buffer, one that waits for counted
    arrivals two, and one whose arrivals are counted one.

    crossing  names of inputs that another device makes, and of outputs that it reads. What spin-waits on such values where one device has
              all layers does so here, where they are complete before it begins, since compilers may round another kernel otherwise; so
              none of them holds SENTINEL
    """
    free, resolved = _barrier_free(schedule.stages, max_bindings, crossing)
    found = [d for spins, stage in zip(free, resolved, strict=True) if spins for d in stage if d.waits]
    counters, writers = _counters(resolved, [names for d in found if d.waits for names in (d.waits.first, d.waits.counted) if names])
    stages = []
    for i, stage in enumerate(resolved):
        produces = i + 1 < len(free) and free[i + 1]
        stages.append([_in_stage(d, free[i], produces, crossing, counters) for d in stage])
    tensors = {name for d in found if d.waits for name in d.waits.words} | {c.counter.name for c in counters.values()}
    together = {a.tensor.name for d in writers for a in d.args if "w" in a.access and a.tensor.kind == "node"}
    numbers = frozenset(i for i, spins in enumerate(free) if spins)
    return dataclasses.replace(
        schedule, stages=stages, barrier_free=numbers, sentinel_tensors=frozenset(tensors), counted_tensors=frozenset(together - tensors)
    )


def _in_stage(d: Dispatch, free: bool, produces: bool, crossing: Collection[str], counters: Mapping[str, Expected]) -> Dispatch:
    """A dispatch of a stage that is barrier-free, or stands before one that is. crossing: as above."""
    if d.waits is None:
        return d
    spins = bool(d.waits.words) and {*d.waits.words} <= {*crossing} and not (d.waits.counted or d.waits.first)
    crosses = any(name in crossing for name in _outputs(d))
    return synchronized(d, free or spins, counters) if free or produces or spins or crosses else d


@dataclasses.dataclass(frozen=True)
class Expected:
    """A counter of arrivals, and how many it will count."""

    counter: Tensor
    arrivals: int


def _counters(stages: Sequence[Sequence[Dispatch]], waited_for: Sequence[Sequence[str]]) -> tuple[dict[str, Expected], list[Dispatch]]:
    """The counters, by the names of what is waited for by counted arrivals, and the dispatches that count. Dispatches whose outputs some
    consumer waits for together share a counter.

    waited_for  the names that each consumer waits for
    """
    wanted = {name for names in waited_for for name in names}
    writers: dict[str, list[Dispatch]] = {}
    for d in (d for stage in stages for d in stage):
        for name in wanted.intersection(_outputs(d)):
            writers.setdefault(name, []).append(d)
    groups: list[tuple[set[str], dict[int, Dispatch]]] = []
    for names in waited_for:
        mine, by = set(names), {id(d): d for name in names for d in writers[name]}
        others = []
        for group in groups:
            if by.keys() & group[1].keys():
                mine, by = mine | group[0], group[1] | by
            else:
                others.append(group)
        groups = [*others, (mine, by)]
    counters: dict[str, Expected] = {}
    for mine, by in groups:
        counting = list(by.values())
        counter = Tensor(f"{_outputs(counting[0])[0]}{ARRIVALS}", "I32", (COUNTERS, COUNTER_WORDS))
        counters |= dict.fromkeys(mine, Expected(counter, sum(d.waits.arrives for d in counting if d.waits)))
    return counters, [d for _, by in groups for d in by.values()]


def _outputs(d: Dispatch) -> list[str]:
    """Names of what a dispatch makes for others, including states."""
    return [a.tensor.name for a in d.args if "w" in a.access and a.tensor.kind in ("node", "state")]


def _written(stage: Sequence[Dispatch]) -> set[str]:
    """Names of the tensors that a stage makes."""
    return {a.tensor.name for d in stage for a in d.args if "w" in a.access and a.tensor.kind == "node"}


@dataclasses.dataclass(frozen=True)
class _Writer:
    """A dispatch's outputs, and what else is complete once all of its workgroups have arrived; None: it cannot count them."""

    outputs: tuple[str, ...]
    implied: set[str] | None


class _Writes:
    """What was written since the last barrier.

    before   per tensor, for each writer, what happens before its stores
    writers  per tensor its writers
    once     tensors that one stage alone writes
    """

    def __init__(self, once: Collection[str]) -> None:
        self.once = once
        self.before: dict[str, list[set[str]]] = {}
        self.writers: dict[str, list[_Writer]] = {}

    def add(self, d: Dispatch, before: set[str]) -> None:
        """before: what happened before its stores."""
        implied = None
        if d.waits is not None and d.waits.arrives:
            implied = before.union(*({t}.union(*self.before[t]) for t in d.waits.shares if t in self.before))
        writer = _Writer(tuple(_outputs(d)), implied)
        for name in writer.outputs:
            self.before.setdefault(name, []).append(before)
            self.writers.setdefault(name, []).append(writer)

    def countable(self, names: Collection[str]) -> bool:
        """Whether all writers of these tensors can count their arrivals."""
        return all(name in self.once and all(m.implied is not None for m in self.writers[name]) for name in names)

    def implied(self, names: Collection[str]) -> set[str]:
        """What the workgroups of the writers of these tensors waited for, all of them together, where they can count."""
        return set().union(*(m.implied or () for name in names for m in self.writers[name]))

    def arrived(self, names: Collection[str]) -> set[str]:
        """What is complete once all workgroups of the writers of these tensors have arrived."""
        writers = {id(m): m for name in names for m in self.writers[name]}
        complete = {t for m in writers.values() for t in m.outputs if t in self.once and writers.keys() >= {*map(id, self.writers[t])}}
        return complete.union(*(m.implied or () for m in writers.values()))


def _resolved(d: Dispatch, writes: _Writes, crossing: Collection[str] = ()) -> Dispatch:
    """A dispatch with `also`, `also_part` and what is counted resolved: it waits for them as for its other wholes and parts if they were
    made since the last barrier, or come from another device, and otherwise not at all."""
    if d.waits is None or not (d.waits.also or d.waits.also_part or d.waits.counted or d.waits.first):
        return d
    since = tuple(name for name in d.waits.also if name in writes.before or name in crossing)
    counted, first = (tuple(name for name in names if name in writes.before) for names in (d.waits.counted, d.waits.first))
    for name in counted:
        if name in writes.implied([other for other in counted if other != name]):
            counted = tuple(other for other in counted if other != name)
    d = dataclasses.replace(d, waits=dataclasses.replace(d.waits, whole=(*d.waits.whole, *since), also=since, counted=counted, first=first))
    assert d.waits is not None
    complete = _happened_before(d, writes)
    parts = tuple(name for name in d.waits.also_part if name in writes.before and name not in complete)
    return dataclasses.replace(d, waits=dataclasses.replace(d.waits, part=(*d.waits.part, *parts), also_part=parts))


def _barrier_free(
    stages: Sequence[Sequence[Dispatch]], max_bindings: int, crossing: Collection[str]
) -> tuple[list[bool], list[list[Dispatch]]]:
    """For each stage, whether it can run without a barrier before it; and the stages with their waits resolved."""
    found: list[list[Dispatch]] = []
    free = [False] * len(stages)
    writers = Counter(name for stage in stages for name in _written(stage))
    outputs = Counter(name for stage in stages for name in {t for d in stage for t in _outputs(d)})
    single = {name for name, times in outputs.items() if times == 1}
    writes = _Writes(single)
    for i, planned in enumerate(stages):
        stage = [_resolved(d, writes) for d in planned]
        found.append(stage)
        # Memory is filled with SENTINEL beside stage 0, so nobody can spin on what stage 0 writes, nor can that count.
        able = i > 1 and all(d.waits is not None for d in (*stages[i - 1], *stage))
        able = able and all(_bindings(d, True) <= max_bindings for d in stage)
        able = able and all(_bindings(d, free[i - 1]) <= max_bindings for d in found[i - 1])
        once = all(writers[name] == 1 for s in stages[max(i - 1, 0) : i + 1] for name in _written(s))
        free[i] = able and once and all(_ordered(d, writes) for d in stage)
        if not free[i]:
            writes = _Writes(single)
            found[i] = stage = [_resolved(d, writes, crossing) for d in planned]
        for d, before in [(d, _happened_before(d, writes)) for d in stage]:
            writes.add(d, before)
    return free, found


def _bindings(d: Dispatch, free: bool) -> int:
    """Most buffers that a kernel binds, in a barrier-free stage or before one."""
    if d.waits is None or d.waits.specialized:
        return len(d.args)
    return len(d.args) + bool(d.waits.arrives) + (1 + bool(d.waits.counted) if free else 0)


def _ordered(d: Dispatch, writes: _Writes) -> bool:
    """Whether a dispatch waits for, or happens after, everything that it reads; and waits only for what was made since the last barrier."""
    assert d.waits is not None
    spun_on = {*d.waits.whole, *d.waits.part, *d.waits.shares}
    complete = spun_on | _happened_before(d, writes)
    known = writes.countable((*d.waits.counted, *d.waits.first)) and spun_on <= writes.before.keys()
    return known and all(name in complete for name, _ in d.reads if name in writes.before)


def _happened_before(d: Dispatch, writes: _Writes) -> set[str]:
    """Tensors that are complete once the waits of a dispatch have ended."""
    if d.waits is None:
        return set()
    # A tensor may have several writers. A part of it may come from any of them, the whole comes from all.
    of_wholes = [set.union(*writes.before[t]) for t in d.waits.whole if t in writes.before]
    of_parts = [set.intersection(*writes.before[t]) for t in (*d.waits.part, *d.waits.shares) if t in writes.before]
    return set(d.waits.whole).union(*of_wholes, *of_parts, writes.arrived((*d.waits.counted, *d.waits.first)))


def synchronized(d: Dispatch, free: bool, counters: Mapping[str, Expected] | None = None) -> Dispatch:
    """A dispatch whose kernel does not store SENTINEL and, in a barrier-free stage, waits for what it reads.

    counters  by the names of what is waited for by counted arrivals
    """
    if d.waits is None:
        return d
    counters = counters or {}
    arrivals = next((counters[name].counter for name in _outputs(d) if name in counters), None)
    expected = next((counters[name] for name in d.waits.counted if name in counters), None) if free else None
    first = next((counters[name] for name in d.waits.first if name in counters), None) if free else None
    if first is not None and expected == first:
        expected = None  # one wait is enough
    spins = free and bool(d.waits.words)
    state = Arg(STATE, "rw") if spins or expected or first else None
    kernel, args = d.kernel, d.args
    if d.waits.specialized:
        found = interface(kernel.source)
        values = {"SPINS_ON_X": int(spins), "ARRIVES": int(arrivals is not None), "EXPECTED": expected.arrivals if expected else 0}
        if first is not None:
            values["EXPECTED_FIRST"] = first.arrivals
        spec = dict(kernel.spec) | {name: value for name, value in values.items() if value}
        if "SYNC" in found.constants:  # F16 outputs are waited for by counted arrivals alone, so that SENTINEL may be one of them
            spec["SYNC"] = 1
        kernel = dataclasses.replace(kernel, spec=tuple(sorted(spec.items())))
        buffers = {"Arrivals": Arg(arrivals, "rw") if arrivals else None, "SeenArrivals": Arg(expected.counter) if expected else None}
        if first is not None:
            buffers["FirstArrivals"] = Arg(first.counter)
        bound = list(args)
        for name, arg in (buffers | {"SyncState": state}).items():
            if arg is not None:
                bound[found.binding(name)] = arg
        return dataclasses.replace(d, kernel=kernel, args=tuple(bound))
    defines: dict[str, str | int] = {**dict(kernel.defines), "SYNC_SENTINEL": 1, "SPINS": int(spins)}
    if spins and d.waits.also:
        defines["SPINS_ON_ALL"] = 1
    if spins and d.waits.also_part:
        defines["SPINS_ON_PARTS"] = 1
    if arrivals:
        defines |= {"ARRIVES": 1, "BIND_ARRIVALS": len(args)}
        args = (*args, Arg(arrivals, "rw"))
    if expected:
        defines |= {"EXPECTED": expected.arrivals, "BIND_EXPECTED": len(args)}
        args = (*args, Arg(expected.counter))
    if state:
        defines["BIND_SYNC_STATE"] = len(args)
        args = (*args, state)
    return dataclasses.replace(d, kernel=dataclasses.replace(kernel, defines=tuple(sorted(defines.items()))), args=args)

"""A schedule: dispatches grouped into stages, with a memory plan. Pure data, printable without a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from vkback.graph import Tensor
from vkback.ops.dispatch import Dispatch, ceil_div
from vkback.ops.op import KernelChoice
from vkback.ops.storage import nbytes

ALIGN = 256
"""Alignment of tensors: the largest minStorageBufferOffsetAlignment that Vulkan allows."""


def aligned(size: int) -> int:
    """Bytes up to where the next tensor may begin."""
    return ceil_div(size, ALIGN) * ALIGN


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives inside the activation arena, in bytes."""

    offset: int
    size: int


@dataclass
class Schedule:
    """Stages in order. Dispatches of one stage do not depend on each other; a barrier stands between two stages.

    barrier_free      numbers of stages that need no barrier before them (vkback/plan/sync.py)
    sentinel_tensors  names of tensors that barrier-free stages spin on, each in memory of its own
    sentinel_range    where these lie; it is filled with SENTINEL before every run
    counted_tensors   names of tensors for which stages wait by counted arrivals, each in memory of its own
    choices           the kernel of each product and each attention, by name of the node (vkback/plan/passes/choose.py)
    block_bytes       size of the blocks that activations lie in (the last one may be shorter); no tensor crosses blocks
    """

    stages: list[list[Dispatch]]
    slots: dict[str, Slot] = field(default_factory=dict)
    activation_bytes: int = 0
    barrier_free: frozenset[int] = frozenset()
    sentinel_tensors: frozenset[str] = frozenset()
    sentinel_range: Slot = Slot(0, 0)
    counted_tensors: frozenset[str] = frozenset()
    block_bytes: int = 1 << 62
    choices: tuple[tuple[str, KernelChoice], ...] = ()

    @property
    def blocks(self) -> list[int]:
        """Bytes of each block of activations."""
        whole, rest = divmod(self.activation_bytes, self.block_bytes)
        return [self.block_bytes] * whole + [rest] * (rest > 0)

    def dispatches(self) -> Iterable[Dispatch]:
        return (d for stage in self.stages for d in stage)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight matrices that a run reads."""
        return sum(d.weight_bytes for d in self.dispatches())

    def tensors(self) -> dict[str, Tensor]:
        return {a.tensor.name: a.tensor for d in self.dispatches() for a in d.args}


def overlap(part: str, other: str) -> bool:
    """Whether two parts of one tensor (see Arg) may share values."""
    return not part or not other or part == other


def without_repeats(dispatches: Sequence[Dispatch], sources: Collection[str]) -> list[Dispatch]:
    """The dispatches without those that kernels of these sources would repeat on values that have not changed since."""
    out: list[Dispatch] = []
    done: dict[tuple[object, ...], set[str]] = {}
    for d in dispatches:
        key = (d.kernel, d.args, d.push, d.groups) if d.kernel.source in sources else None
        if key in done:
            continue
        written = {name for name, _ in d.writes}
        for stale in [k for k, names in done.items() if not names.isdisjoint(written)]:
            del done[stale]
        if key:
            done[key] = {a.tensor.name for a in d.args}
        out.append(d)
    return out


class _Touched:
    """The last stage that touched each part of each tensor."""

    def __init__(self) -> None:
        self._stage: dict[str, dict[str, int]] = {}

    def last(self, name: str, part: str) -> int:
        """Last stage that touched anything overlapping this part, -1 if none did."""
        parts = self._stage.get(name, {})
        return max((stage for other, stage in parts.items() if overlap(part, other)), default=-1)

    def touch(self, name: str, part: str, stage: int) -> None:
        parts = self._stage.setdefault(name, {})
        parts[part] = max(parts.get(part, -1), stage)


def _first_after(d: Dispatch, written: _Touched, read: _Touched) -> int:
    """The first stage behind all that a dispatch must not run beside."""
    return max([0, *(written.last(*r) + 1 for r in d.reads), *(max(written.last(*w), read.last(*w)) + 1 for w in d.writes)])


def _touch(d: Dispatch, stage: int, written: _Touched, read: _Touched) -> None:
    """A dispatch runs in this stage."""
    for r in d.reads:
        read.touch(*r, stage)
    for w in d.writes:
        written.touch(*w, stage)


def into_stages(dispatches: Sequence[Dispatch], *, ahead: int | None = None, given: Collection[str] = ()) -> list[list[Dispatch]]:
    """Puts each dispatch into the earliest stage after everything it depends on: read after write, write after read, write after write.

    ahead  but at most so many stages before the last one so far, so that values live little longer than the order of dispatches requires
    given  names of tensors that count as made in stage 0
    """
    written, read = _Touched(), _Touched()
    for name in given:
        written.touch(name, "", 0)
    stages: list[list[Dispatch]] = []
    for d in dispatches:
        least = 0 if ahead is None else max(len(stages) - 1 - ahead, 0)
        level = max(least, _first_after(d, written, read))
        _touch(d, level, written, read)
        while len(stages) <= level:
            stages.append([])
        stages[level].append(d)
    return stages


def _needed(stages: Sequence[Sequence[Dispatch]], outputs: Collection[str]) -> set[int]:
    """Ids of dispatches that an output depends on, or an input or a weight that is written in place."""
    wanted, found = {*outputs}, set[int]()
    for d in (d for stage in reversed(stages) for d in stage):
        if any("w" in a.access and (a.tensor.name in wanted or a.tensor.kind in ("input", "weight")) for a in d.args):
            found.add(id(d))
            wanted |= {name for name, _ in d.reads}
    return found


def with_side_results_late(
    stages: Sequence[Sequence[Dispatch]], outputs: Collection[str], still: Collection[str] = ()
) -> list[list[Dispatch]]:
    """The stages with all that leads to states alone, as the caches of an EAGLE-3 head, as late as it may run: then it is in few stages,
    and next to each other. outputs: names of the graph's. Where all leads to states, as in a prompt without logits, nothing moves.
    still: sources of kernels that stay where they are."""
    needed = _needed(stages, outputs)
    if not needed:
        return [[*stage] for stage in stages]
    needed |= {id(d) for stage in stages for d in stage if d.kernel.source in still}
    # The same as `into_stages` from the end: stages count backwards.
    written, read = _Touched(), _Touched()
    found: list[list[Dispatch]] = [[] for _ in stages]
    for i, stage in enumerate(reversed(stages)):
        for d in stage:
            level = i if id(d) in needed else _first_after(d, written, read)
            _touch(d, level, written, read)
            found[level].append(d)
    order = {id(d): n for n, d in enumerate(d for stage in stages for d in stage)}
    return [sorted(stage, key=lambda d: order[id(d)]) for stage in reversed(found)]


def in_one_block(offset: int, size: int, block: int) -> int:
    """The first offset from `offset` on at which so many bytes fit in one block; tensors larger than a block begin with one."""
    return offset if offset // block == (offset + size - 1) // block else ceil_div(offset, block) * block


def allocate(
    stages: Sequence[Sequence[Dispatch]],
    keep: Iterable[str] = (),
    elsewhere: frozenset[str] = frozenset(),
    block: int = 1 << 62,
    barrier_free: Collection[int] = (),
) -> tuple[dict[str, Slot], int]:
    """Offsets for all tensors of kind "node": memory is reused once the last stage that touches its tensor has passed, that is, behind the
    next barrier.

    keep   names of tensors that must survive to the end (graph outputs)
    elsewhere  names of tensors with memory of their own
    block  bytes of a block; no tensor crosses blocks
    barrier_free  numbers of stages that have no barrier before them: those of a branch may still run beside later ones of another
    Returns the slots and the arena's size. First fit over the free gaps, largest tensors of a stage first.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for i, stage in enumerate(stages):
        for d in stage:
            for a in d.args:
                if a.tensor.kind != "node" or a.tensor.name in elsewhere:
                    continue
                name = a.tensor.name
                first.setdefault(name, i)
                last[name] = i
                sizes[name] = max(sizes.get(name, 0), aligned(nbytes(a.tensor)))
    for name in last:
        while last[name] + 1 in barrier_free:
            last[name] += 1
    # Outputs live beyond the last stage, so that nothing takes their memory.
    for name in keep:
        if name in last:
            last[name] = len(stages)
    begins: list[list[str]] = [[] for _ in stages]
    for name, i in first.items():
        begins[i].append(name)
    slots: dict[str, Slot] = {}
    total = 0
    live: list[str] = []
    for i in range(len(stages)):
        # Free what no stage from here on touches.
        live = [n for n in live if last[n] >= i]
        # Largest first: small tensors then fill the gaps.
        for name in sorted(begins[i], key=lambda n: (-sizes[n], n)):
            offset = 0
            # First fit: the first gap between live tensors that is large enough.
            for other in sorted((slots[n] for n in live), key=lambda s: s.offset):
                if offset + sizes[name] <= other.offset:
                    break
                offset = in_one_block(max(offset, other.offset + other.size), sizes[name], block)
            slots[name] = Slot(offset, sizes[name])
            live.append(name)
            total = max(total, offset + sizes[name])
    return slots, total


def allocate_unaliased(stages: Sequence[Sequence[Dispatch]], names: frozenset[str], start: int) -> tuple[dict[str, Slot], int]:
    """Offsets from `start` on for tensors that share memory with no other; returns the slots and where they end."""
    sizes = {a.tensor.name: aligned(nbytes(a.tensor)) for stage in stages for d in stage for a in d.args if a.tensor.name in names}
    slots: dict[str, Slot] = {}
    end = start
    for name, size in sizes.items():
        slots[name] = Slot(end, size)
        end += size
    return slots, end

"""Memory of the cache of experts that the device keeps itself (vkback/plan/passes/experts.py), and what it has counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vkback.device import Arena, BufferRange, Device
from vkback.engine.host_weights import HostWeights
from vkback.engine.plans import Plans
from vkback.errors import VkbackError
from vkback.graph import Tensor
from vkback.ops.moe.expert_cache import FOUND, WANTED
from vkback.ops.storage import nbytes
from vkback.plan.passes.experts import CACHED, TABLE
from vkback.plan.schedule import Schedule, aligned
from vkback.program import WeightRanges


class ExpertCacheError(VkbackError):
    """A cache of experts that would never be read."""


@dataclass(frozen=True)
class ExpertCounts:
    """Experts that steps wanted, each once a layer and step, and those of them that lay in the cache already."""

    wanted: int = 0
    found: int = 0

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(self.wanted + other.wanted, self.found + other.found)

    def __sub__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(self.wanted - other.wanted, self.found - other.found)

    @property
    def share(self) -> float:
        """Of those wanted, the ones that were there."""
        return self.found / self.wanted if self.wanted else 0.0


class ExpertCache:
    """Slots and tables of all layers.

    slots   memory of the slots, by the names of their tensors
    tables  memory of the tables, likewise
    """

    def __init__(self, device: Device, schedules: Iterable[Schedule]) -> None:
        """Takes the memory that the schedules use; it is empty. Raises OutOfDeviceMemory."""
        tensors = {t.name: t for s in schedules for t in s.tensors().values()}
        slots = [t for t in tensors.values() if t.name.endswith(CACHED)]
        tables = [t for t in tensors.values() if t.name.endswith(TABLE)]
        self._device = device
        self._tables = {t.name: t.elements for t in tables}
        self.arenas: list[Arena] = []
        try:
            self.slots = {t.name: WeightRanges((r,)) for t, r in self._placed("cache of experts", slots)}
            self.tables = {t.name: r for t, r in self._placed("tables of experts", tables)}
            for name, memory in self.tables.items():
                device.upload(memory, np.zeros(self._tables[name], np.uint32))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give its memory back."""
        for arena in self.arenas:
            arena.destroy()
        self.arenas.clear()

    def _placed(self, purpose: str, tensors: list[Tensor]) -> list[tuple[Tensor, BufferRange]]:
        if not tensors:
            return []
        self.arenas.append(self._device.arena(purpose, sum(aligned(nbytes(t)) for t in tensors), "device"))
        return [(t, self.arenas[-1].alloc(nbytes(t), t.name)) for t in tensors]

    def counts(self) -> ExpertCounts:
        """So far, of all layers. Reads the device, which must have nothing in flight."""
        heads = [self._device.download(memory, np.uint32) for memory in self.tables.values()]
        return ExpertCounts(sum(int(head[WANTED]) for head in heads), sum(int(head[FOUND]) for head in heads))


def expert_cache(
    device: Device, plans: Plans, there: HostWeights, slots: int, schedules: Callable[[], Iterable[Schedule]], model: str
) -> ExpertCache | None:
    """A cache of so many experts of each layer in memory of the host, for which all is planned anew; None where there are no such layers.

    schedules  those of a token and of prompts, as they are planned then
    Raises ExpertCacheError for fewer slots than a token uses, OutOfDeviceMemory.
    """
    cached = there.rule.cached
    if not slots or not any(layer < cached for layer in there.with_experts):
        return None
    plans.cache_experts(cached, slots)
    made = ExpertCache(device, schedules())
    if not made.tables:
        made.close()
        raise ExpertCacheError(
            f"[experts] {model}: a cache of {slots} experts a layer (expert_cache, --expert-cache) holds less than a token uses, or "
            "experts that cannot be copied; expected more, or none"
        )
    return made

"""Recurrent states as they were some tokens ago, kept on the device, to go back to."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.device import BufferRange, Commands, Device
from vkback.plan.schedule import aligned


class Checkpoint:
    """A copy of recurrent states, on the device: those after `at` tokens."""

    def __init__(self, device: Device, states: Sequence[BufferRange]) -> None:
        self.at = 0
        self._device = device
        self._arena = device.arena("checkpoint of recurrent states", sum(aligned(s.size) for s in states), "device")
        copies = [self._arena.alloc(s.size, f"copy of {s.name}") for s in states]
        self._save = self._recorded("save recurrent states", states, copies)
        self._restore = self._recorded("restore recurrent states", copies, states)

    def _recorded(self, name: str, sources: Sequence[BufferRange], targets: Sequence[BufferRange]) -> Commands:
        rec = self._device.recorder(name)
        for source, target in zip(sources, targets, strict=True):
            rec.copy(source, target)
        return rec.finish()

    def save(self, at: int) -> None:
        self.at = at
        self._device.submit(self._save)

    def restore(self) -> None:
        self._device.submit(self._restore)

    def close(self) -> None:
        self._save.destroy()
        self._restore.destroy()
        self._arena.destroy()

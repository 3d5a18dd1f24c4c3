"""Recurrent states as they were some tokens ago, kept on the device, to go back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vkback.device import BufferRange, Commands, Device
from vkback.plan.schedule import aligned


class Checkpoint:
    """A copy of recurrent states, on the device: those after `at` tokens."""

    def __init__(self, device: Device, parts: Callable[[int], Sequence[BufferRange]]) -> None:
        """parts: where the states after so many tokens lie, as many and as large for any number."""
        self.at = 0
        self._device, self._parts = device, parts
        sizes = [part.size for part in parts(0)]
        self._arena = device.arena("checkpoint of recurrent states", sum(map(aligned, sizes)), "device")
        self._copies = [self._arena.alloc(size, f"copy {i} of recurrent states") for i, size in enumerate(sizes)]
        self._recorded: dict[tuple[str, tuple[int, ...]], Commands] = {}

    def save(self, at: int) -> None:
        self.at = at
        self._run("save", self._parts(at), self._copies)

    def restore(self) -> None:
        self._run("restore", self._copies, self._parts(self.at))

    def _run(self, name: str, sources: Sequence[BufferRange], targets: Sequence[BufferRange]) -> None:
        key = name, tuple(part.offset for part in (*sources, *targets))
        if key not in self._recorded:
            rec = self._device.recorder(f"{name} recurrent states")
            for source, target in zip(sources, targets, strict=True):
                rec.copy(source, target)
            self._recorded[key] = rec.finish()
        self._device.submit(self._recorded[key])

    def close(self) -> None:
        for commands in self._recorded.values():
            commands.destroy()
        self._recorded.clear()
        self._arena.destroy()

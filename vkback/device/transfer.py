"""Moving bytes between numpy and the device: blocking copies, and a streaming uploader over a ring of staging buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vkback.device.errors import DeviceError
from vkback.device.memory import Arena, BufferRange, Bytes
from vkback.device.recorder import Commands

if TYPE_CHECKING:
    from vkback.device.device import Device

CHUNK = 16 << 20
"""Bytes of a staging slot: large enough that a copy over PCIe (a millisecond) dwarfs a submission (tens of microseconds)."""

BLOCKING_CHUNK = 4 << 20
"""Bytes of a slot for blocking transfers, whose staging memory lives as long as the device."""

SLOTS = 3
"""One being filled, one being copied, one waiting."""


def as_bytes(data: npt.NDArray[Any]) -> Bytes:
    """The bytes of an array, without a copy when it is contiguous."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class Uploader:
    """Streams many writes to the device: fills one staging slot while another is copied.

    Writes are ordered after everything submitted before; `finish` returns when all have arrived. Ranges that the host sees are written
    directly, so no submitted work may be using them.
    """

    def __init__(self, device: Device, chunk_bytes: int = CHUNK) -> None:
        if chunk_bytes < 4:
            raise DeviceError(f"[upload] chunk_bytes is {chunk_bytes}; at least 4 is needed")
        self._device = device
        self._chunk = chunk_bytes
        self._arena: Arena | None = None
        self._slots: list[BufferRange] = []
        self._flights: list[Commands | None] = []
        self._current = 0
        self._filled = 0
        self._copies: list[tuple[int, BufferRange]] = []

    def write(self, dst: BufferRange, offset: int, data: npt.NDArray[Any]) -> None:
        """Write an array's bytes at `offset` of a range. The array may be changed as soon as this returns."""
        source = as_bytes(data)
        if offset < 0 or offset + source.size > dst.size:
            raise DeviceError(f"[upload] {source.size} bytes at {offset} do not fit into {dst.name!r} of {dst.size} bytes")
        if not source.size:
            return
        if dst.host_visible:
            dst.map()[offset : offset + source.size] = source
            return
        at = 0
        while at < source.size:
            if self._filled >= self._chunk:
                self._flush()
            part = min(source.size - at, self._chunk - self._filled)
            self._slot().map()[self._filled : self._filled + part] = source[at : at + part]
            self._copies.append((self._filled, dst.slice(offset + at, part)))
            # Slot offsets stay multiples of 16: copies from unaligned addresses are slow on some devices.
            self._filled += -(-part // 16) * 16
            at += part

    def finish(self) -> None:
        """Wait until everything has arrived, and free the staging memory."""
        try:
            self.flush_and_wait()
        finally:
            if self._arena is not None:
                self._arena.destroy()
                self._arena = None
            self._slots, self._flights = [], []

    def flush_and_wait(self) -> None:
        """Wait until everything has arrived, and keep the staging memory for more."""
        self._flush()
        for i in range(len(self._flights)):
            self._land(i)

    def _slot(self) -> BufferRange:
        if self._arena is None:
            self._arena = self._device.arena("upload staging", SLOTS * (-(-self._chunk // 256) * 256), "upload")
            self._slots = [self._arena.alloc(self._chunk, f"staging {i}") for i in range(SLOTS)]
            self._flights = [None] * SLOTS
        return self._slots[self._current]

    def _land(self, slot: int) -> None:
        flight = self._flights[slot]
        if flight is not None:
            flight.destroy()
            self._flights[slot] = None

    def _flush(self) -> None:
        if not self._copies:
            return
        slot = self._slot()
        rec = self._device.recorder("upload")
        for start, dst in self._copies:
            rec.copy(slot.slice(start, dst.size), dst)
        commands = rec.finish()
        self._device.submit(commands)
        self._flights[self._current] = commands
        self._copies = []
        self._current = (self._current + 1) % SLOTS
        self._filled = 0
        self._land(self._current)


def _batches(ranges: Sequence[BufferRange], chunk: int) -> Iterator[list[BufferRange]]:
    """The ranges in order, in batches of at most `chunk` bytes."""
    batch: list[BufferRange] = []
    room = chunk
    for src in ranges:
        at = 0
        while at < src.size:
            part = min(room, src.size - at)
            batch.append(src.slice(at, part))
            at += part
            room -= part
            if not room:
                yield batch
                batch, room = [], chunk
    if batch:
        yield batch


def download(device: Device, ranges: Sequence[BufferRange], staging: tuple[BufferRange, BufferRange]) -> Bytes:
    """Copy ranges that the host does not see, end to end, through two staging slots in turn."""
    out = np.empty(sum(src.size for src in ranges), np.uint8)
    pending: tuple[Commands, BufferRange, int] | None = None

    def land() -> None:
        if pending is not None:
            commands, part, start = pending
            commands.wait()
            out[start : start + part.size] = part.map()
            commands.destroy()

    start = 0
    for i, batch in enumerate(_batches(ranges, staging[0].size)):
        whole = staging[i % 2].slice(0, sum(src.size for src in batch))
        rec = device.recorder("download")
        at = 0
        for src in batch:
            rec.copy(src, whole.slice(at, src.size))
            at += src.size
        rec.host_barrier()
        commands = rec.finish()
        device.submit(commands)
        land()
        pending = (commands, whole, start)
        start += whole.size
    land()
    return out

"""What the device keeps of a text: the rows of the KV cache and recurrent states, in one piece of its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import BufferRange, Device, OutOfDeviceMemory
from vkback.graph import Tensor
from vkback.models.cache_range import Found, beyond_range, judge
from vkback.ops.storage import VALUE_BYTES, nbytes
from vkback.plan.schedule import aligned

Arrays = Mapping[str, npt.NDArray[Any]]

DTYPES = {"F16": "<f2", "F32": "<f4"}
"""Of caches that hold plain values."""

SMALLER = "A smaller context (--ctx, ctx=) takes less, and so do keys and values of another type (--cache-type-k q8_0, ...)"


def ring_parts(whole: BufferRange, ring: int, spare: int, rows: int) -> list[BufferRange]:
    """What counts of a recurrent state after so many tokens, in the order that it has without spare slots. ring: its slots, or the rows of
    a convolution's; spare: how many more than without states that are kept to go back to."""
    size, count = whole.size // ring, ring - spare
    latest = {at % count: at for at in range(rows - count, rows)}
    return [whole.slice(latest[i] % ring * size, size) for i in range(count)] if spare else [whole]


class DeviceState:
    """Memory for state tensors. Those named by `caches` are [n_head_kv, n_ctx, head_dim] and hold a row for each token, the others
    (recurrent states) hold all tokens so far, in rings. As arrays they are what a Snapshot has. The caller destroys its `arena`."""

    def __init__(self, device: Device, tensors: Iterable[Tensor], caches: Collection[str], slots: int = 2) -> None:
        """slots: of a recurrent state (`StateSlots`). Raises OutOfDeviceMemory, which says what takes less."""
        found = list(tensors)
        self._spare = slots - 2
        self._rings = {t.name: t.shape[0] for t in found if t.name not in caches}
        self._device = device
        try:
            self.arena = device.arena("KV cache", sum(aligned(nbytes(t)) for t in found) or aligned(1), "device")
        except OutOfDeviceMemory as error:
            raise OutOfDeviceMemory(f"{error}. {SMALLER}", call=error.call, result=error.result) from error
        self.ranges: dict[str, BufferRange] = {t.name: self.arena.alloc(nbytes(t), t.name) for t in found}
        self._caches = {t.name: t for t in found if t.name in caches}

    @property
    def recurs(self) -> bool:
        """Whether there are recurrent states."""
        return bool(self._rings)

    def recurrent(self, rows: int) -> list[BufferRange]:
        """Where the recurrent states after so many tokens lie."""
        return [part for name in self._rings for part in self._parts(name, rows)]

    def download(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """All that is kept of so many tokens."""
        parts = {name: self._parts(name, rows) for name in self.ranges}
        raw = self._device.download_many([part for of_one in parts.values() for part in of_one])
        arrays: dict[str, npt.NDArray[Any]] = {}
        at = 0
        for name, of_one in parts.items():
            size = sum(part.size for part in of_one)
            shape, dtype = self._stored(name, rows)
            arrays[name] = raw[at : at + size].view(dtype).reshape(shape)
            at += size
        return arrays

    def misfit(self, arrays: Arrays, rows: int) -> str:
        """What keeps arrays from being those of so many tokens here: "cache_k_l0 is ..., expected ..."; "" where nothing does."""
        wanted = {name: self._stored(name, rows) for name in self.ranges}
        found = {name: (a.shape, a.dtype.str) for name, a in arrays.items()}
        if found == wanted:
            return ""
        name = next(n for n in (*wanted, *found) if found.get(n) != wanted.get(n))
        return f"{name} is {found.get(name)}, expected {wanted.get(name)}"

    def upload(self, arrays: Arrays, rows: int) -> None:
        """The opposite of `download`, of arrays that fit."""
        uploader = self._device.uploader()
        try:
            for name, array in arrays.items():
                raw, at = np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0
                for part in self._parts(name, rows):
                    uploader.write(part, 0, raw[at : at + part.size])
                    at += part.size
        finally:
            uploader.finish()

    def beyond_range(self, rows: int) -> list[tuple[str, str]]:
        """Name and type of each cache whose first rows hold what is beyond the range of its type (vkback/models/cache_range.py)."""
        names = beyond_range(list(self._caches), lambda name: self._judge(name, rows))
        return [(name, self._caches[name].type) for name in names]

    def _judge(self, name: str, rows: int) -> Found:
        cache = self._caches[name]
        if cache.type == "F32":
            parts = self._parts(name, rows)
            return "numbers" if not parts or np.isfinite(self._device.download_many(parts).view(np.float32)).all() else "nan"
        parts = self._parts(name, rows, scales=True)
        return judge(self._device.download_many(parts).view(np.uint16)) if parts else "numbers"

    def _stored(self, name: str, rows: int) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a state as an array: a quantized cache is bytes, its planes one after the other."""
        cache = self._caches.get(name)
        if cache is None:
            return (sum(part.size for part in self._parts(name, rows)) // 4,), "<f4"
        heads, _, dim = cache.shape
        if cache.type in DTYPES:
            return (heads, rows, dim), DTYPES[cache.type]
        return (sum(part.size for part in self._parts(name, rows)),), "|u1"

    def _parts(self, name: str, rows: int, *, scales: bool = False) -> list[BufferRange]:
        """The first rows of each head of a cache, plane by plane; scales: of a quantized one those alone. Of a recurrent state what counts:
        with two slots all of it, and of more the same in the same order."""
        cache = self._caches.get(name)
        if cache is None:
            return ring_parts(self.ranges[name], self._rings[name], self._spare, rows)
        heads, n_ctx, dim = cache.shape
        planes = (
            [(0, VALUE_BYTES[cache.type] * dim)]
            if cache.type in DTYPES
            else [(p.offset, p.row_bytes) for p in quants.layout(cache.type, heads * n_ctx, dim).planes if p.name == "d" or not scales]
        )
        return [
            self.ranges[name].slice(offset + head * n_ctx * row_bytes, rows * row_bytes)
            for offset, row_bytes in planes
            for head in range(heads)
            if rows
        ]

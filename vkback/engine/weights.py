"""Weights from the file into device memory: combined by recipe, repacked, streamed.

GPUs repack themselves (vkback/engine/weight_stream.py). For CPU drivers all cores do it here, as the file is read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Capabilities, Device
from vkback.engine.weight_rows import decoded, file_bytes, gather_rows, not_numbers, vector_values
from vkback.engine.weight_stream import OnBytes, OnWait, StreamTimes, WeightStream
from vkback.events import Report, Reported
from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.ops.storage import shards
from vkback.plan.schedule import aligned
from vkback.plan.weight_layout import stored_type
from vkback.program import WeightRanges
from vkback.quants.word_moves import moves_words
from vkback.shader import ShaderLibrary

Bytes = npt.NDArray[np.uint8]

Repack = Literal["device", "host"]
"""Who repacks."""

REPACKS: tuple[Repack, ...] = ("device", "host")

CHUNK_BYTES = 1 << 20
"""File bytes that a core of the host repacks at a time: they fit its cache."""

VECTORS_BYTES = 1 << 20
"""Of a staging slot for weights of one axis."""


def repacks(caps: Capabilities) -> Repack:
    """Who repacks weights for a device. A core of a host repacks 1.3 to 2.8 GB/s, a GPU more than PCIe brings; a CPU driver is the host."""
    return "host" if caps.software else "device"


@dataclass(frozen=True)
class _Piece:
    """Rows of one shard, repacked: where each plane's bytes go, unless they are there already."""

    weight: str
    target: BufferRange
    planes: list[tuple[int, Bytes]]
    file_bytes: int
    beyond_f16: bool
    coarse: bool


class LoadedWeights(NamedTuple):
    """arena holds all of them but those in memory of the host, which `host` holds; the caller destroys both. ranges has every weight's
    shards; beyond_f16 names matrices with weights that f16 cannot hold, coarse those whose quantization step is too large for subnormal f16
    (LowerContext)."""

    arena: Arena
    ranges: dict[str, WeightRanges]
    beyond_f16: frozenset[str]
    coarse: frozenset[str]
    host: Arena | None = None

    @property
    def arenas(self) -> list[Arena]:
        """All memory that there is."""
        return [self.arena, *([self.host] if self.host is not None else [])]


def device_bytes(weight: Tensor, caps: Capabilities) -> int:
    """Bytes a weight takes in device memory, each shard aligned."""
    if len(weight.shape) == 1:
        return aligned(4 * weight.shape[0])
    return sum(aligned(s.layout.nbytes) for s in shards(weight, caps))


class WeightLoad:
    """Weights on their way to a device: `ranges` is where they will be, from the beginning on; `run` brings them there.

    Use as a context manager: leaving it by an exception gives all memory back.
    times  of the last `run`, where the device repacks
    """

    def __init__(
        self,
        file: GgufFile,
        weights: Mapping[str, Tensor],
        device: Device,
        library: ShaderLibrary | None = None,
        *,
        repack: Repack | None = None,
        in_host: Collection[str] = (),
    ) -> None:
        """weights: by name, with the recipes that say which tensors of the file make them. The size is known, and all memory taken, before
        anything is read. repack: where, by default `repacks`; the device needs `library`. The host does where a weight is decoded. in_host:
        names of weights that kernels read in memory of the host."""
        self._file, self._device = file, device
        self.total_bytes = sum(file_bytes(file, w) for w in weights.values())
        self.times = StreamTimes()
        self.ranges: dict[str, WeightRanges] = {}
        sizes_of = {w.name: device_bytes(w, device.caps) for w in weights.values()}
        there = sum(size for name, size in sizes_of.items() if name in in_host)
        self.arena = device.arena("weights", max(sum(sizes_of.values()) - there, 1), "device")
        self.host: Arena | None = None
        self._beyond_f16: set[str] = set()
        self._coarse: set[str] = set()
        self._stop = threading.Event()
        self._stream: WeightStream | None = None
        try:
            self.host = device.arena("weights in host memory", there, "host") if there else None
            for w in weights.values():
                sizes = [4 * w.shape[0]] if len(w.shape) == 1 else [s.layout.nbytes for s in shards(w, device.caps)]
                arena = self.host if self.host is not None and w.name in in_host else self.arena
                self.ranges[w.name] = WeightRanges(tuple(arena.alloc(size, w.name) for size in sizes))
            self._vectors = {w: vector_values(file, w) for w in weights.values() if len(w.shape) == 1}
            matrices = [w for w in weights.values() if len(w.shape) > 1]
            by_device = (repack or repacks(device.caps)) == "device"
            streamed = {
                w: self.ranges[w.name].shards
                for w in matrices
                if by_device and moves_words(stored_type(w.type, w.shape[-1], device.caps)) and not decoded(file, w)
            }
            self._on_host = [w for w in matrices if w not in streamed]
            if streamed:
                self._stream = WeightStream(file, streamed, device, library or ShaderLibrary())
                self.times = self._stream.times
            self._uploader = device.uploader(VECTORS_BYTES)
        except BaseException:
            self._give_back()
            raise

    def __enter__(self) -> WeightLoad:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        if kind is not None:
            self._give_back()

    def _give_back(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.arena.destroy()
        if self.host is not None:
            self.host.destroy()

    @contextlib.contextmanager
    def running(self, work: Reported) -> Iterator[None]:
        """`run` in another thread meanwhile; at the end it is waited for, or stopped if the block fails."""
        fault: list[BaseException] = []

        def run() -> None:
            try:
                self.run(work.advance, work.waits_for)
            except BaseException as error:
                fault.append(error)

        thread = threading.Thread(target=run, name="vkback weights")
        thread.start()
        try:
            yield
            while thread.is_alive():
                thread.join(0.1)  # Ctrl-C is heard between
        finally:
            self._stop.set()
            thread.join()
        if fault:
            raise fault[0]

    def run(self, on_bytes: OnBytes, on_wait: OnWait) -> None:
        """Bring all weights to the device; see `WeightStream.run` for the arguments. Raises GgufError naming a tensor with weights that are
        not numbers, or a file that has changed."""
        try:
            for weight, vector in self._vectors.items():
                self._uploader.write(self.ranges[weight.name].shards[0], 0, vector.view(np.uint8))
                on_bytes(file_bytes(self._file, weight))
            if self._stream is not None:
                self._stream.run(on_bytes, on_wait, self._stop.is_set)
                if unsound := self._stream.unsound():
                    raise not_numbers(self._file, unsound[0])
                self._beyond_f16, self._coarse = self._stream.beyond_f16(), self._stream.coarse()
            if self._on_host:
                on_wait("repacking")
                self._repack_all(on_bytes)
        finally:
            self._uploader.finish()

    def _repack_all(self, on_bytes: OnBytes) -> None:
        chunks = (
            (self._file, w, stored_type(w.type, w.shape[-1], self._device.caps), block, s.row0, s.layout, a, b)
            for w in self._on_host
            for s, block in zip(shards(w, self._device.caps), self.ranges[w.name].shards, strict=True)
            for a, b in _chunks(s.rows, w)
        )
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for piece in _in_order(pool, chunks):
                if self._stop.is_set():
                    return
                for offset, data in piece.planes:
                    self._uploader.write(piece.target, offset, data)
                if piece.beyond_f16:
                    self._beyond_f16.add(piece.weight)
                if piece.coarse:
                    self._coarse.add(piece.weight)
                on_bytes(piece.file_bytes)

    def loaded(self) -> LoadedWeights:
        """After `run`: the weights. Staging memory goes back."""
        if self._stream is not None:
            self._stream.close()
        return LoadedWeights(self.arena, self.ranges, frozenset(self._beyond_f16), frozenset(self._coarse), self.host)


def load_weights(
    file: GgufFile,
    weights: Mapping[str, Tensor],
    device: Device,
    library: ShaderLibrary | None = None,
    *,
    progress: Report | Literal[False] | None = None,
    repack: Repack | None = None,
) -> LoadedWeights:
    """Bring weights to the device; see `WeightLoad`."""
    with WeightLoad(file, weights, device, library, repack=repack) as load:
        with Reported(progress or None, "load", load.total_bytes, "reading") as work:
            load.run(work.advance, work.waits_for)
        return load.loaded()


def _chunks(rows: int, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges of about CHUNK_BYTES, in multiples of 64 rows so that planes of single bytes start on words."""
    per_row = max(1, quants.row_bytes(weight.type, weight.shape[-1]))
    step = max(64, CHUNK_BYTES // per_row // 64 * 64)
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


def _in_order(pool: ThreadPoolExecutor, chunks: Iterable[tuple[Any, ...]]) -> Iterator[_Piece]:
    """Results of _repack in the order of the chunks, with a bounded number under way so that the host never holds a second copy of the
    model."""
    pending = iter(chunks)
    under_way: list[Future[_Piece]] = [pool.submit(_repack, *chunk) for chunk in islice(pending, 2 * (os.cpu_count() or 1))]
    while under_way:
        piece = under_way.pop(0).result()
        under_way.extend(pool.submit(_repack, *chunk) for chunk in islice(pending, 1))
        yield piece


def _repack(
    file: GgufFile, weight: Tensor, stored: str, target: BufferRange, shard_row0: int, layout: quants.DeviceLayout, a: int, b: int
) -> _Piece:
    """Rows a to b-1 of a shard in its layout, as `stored` (stored_type): in place where the host sees the target, else to be uploaded."""
    raw = gather_rows(file, weight, shard_row0 + a, shard_row0 + b)
    if quants.unsound_row(weight.type, raw) is not None:
        raise not_numbers(file, weight)
    large = quants.beyond_f16(weight.type, raw), quants.coarse(weight.type, raw)
    if target.host_visible:
        memory = target.map()
        there = [memory[p.offset + a * p.row_bytes : p.offset + b * p.row_bytes].reshape(b - a, p.row_bytes) for p in layout.planes]
        quants.repack(stored, raw, weight.shape[-1], out=there)
        return _Piece(weight.name, target, [], raw.nbytes, *large)
    planes = quants.repack(stored, raw, weight.shape[-1])
    placed = [(where.offset + a * where.row_bytes, p.reshape(-1)) for where, p in zip(layout.planes, planes, strict=True)]
    return _Piece(weight.name, target, placed, raw.nbytes, *large)

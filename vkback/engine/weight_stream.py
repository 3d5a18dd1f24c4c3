"""Weights to a device in the file's own form, repacked there (shaders/load/repack.comp).

Two chunks of staging memory take turns: threads read the file into one while the device copies and repacks the other. Tensors go in the
order of the file, each in pieces of whole groups of blocks (`WordMoves`), so the host holds two chunks and nothing more.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Commands, Device, Recorder
from vkback.engine.weight_rows import Bytes, gather_rows, sources
from vkback.gguf.file import GgufError, GgufFile, GgufTensor
from vkback.graph import Tensor
from vkback.ops.dispatch import ceil_div, pack_push
from vkback.ops.storage import shards
from vkback.plan.schedule import aligned
from vkback.plan.weight_layout import stored_type
from vkback.quants.device_layout import padded_rows
from vkback.quants.word_moves import COARSE, LARGE, UNSOUND, WordMoves, word_moves
from vkback.shader import ShaderLibrary, Variant

CHUNK_BYTES = 32 << 20
"""Of staging memory, twice on the host. A copy over PCIe takes a millisecond, so the tenths that a submit costs the host hide behind it."""

READ_BYTES = 4 << 20
"""Of the file that a thread reads at a time."""

READERS = 8
"""Threads that read, at most: one copies 5 to 10 GB/s from the page cache, and PCIe takes 25 to 50."""

SHARED_WORDS = 2048
"""As in the shader."""

BINDINGS = 4
MAX_PLANES = 8
PUSH_WORDS = 8 + MAX_PLANES + 1

OnWait = Callable[[str], object]
OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class _Run:
    """Groups of a shard that lie one after the other in the file, or that the host has to put together.

    tensor     of the file; None: rows row0..row0 + rows of the weight, gathered by the host and padded
    begin      byte of the file's tensor at which they begin
    nbytes     of them, without zeros up to a whole group
    first      index of its first group in the shard (interleaved rows: in the run)
    in_turn    row_groups, row_step and row_first of the shader; zeros where rows are not interleaved
    """

    weight: Tensor
    moves: WordMoves
    target: BufferRange
    layout: quants.DeviceLayout
    nbytes: int
    tensor: GgufTensor | None = None
    begin: int = 0
    first: int = 0
    in_turn: tuple[int, int, int] = (0, 0, 0)
    row0: int = 0
    row_bytes: int = 0
    """Of a row as the host pads it; 0 where the file's bytes are taken as they are."""

    @property
    def step(self) -> int:
        """Bytes that it may be cut after: a group, of gathered rows as many as make whole groups."""
        return self.row_bytes * self.moves.blocks or self.moves.nbytes

    @property
    def place(self) -> int:
        """In the file: what lies side by side is read one after the other."""
        return self.tensor.offset + self.begin if self.tensor else 0


@dataclass(frozen=True)
class _Piece:
    """Bytes a..b of a run at `at` of a chunk; flag: the word that its dispatch raises."""

    run: _Run
    a: int
    b: int
    at: int
    flag: int

    @property
    def padded(self) -> int:
        """Bytes with zeros up to a whole group."""
        return ceil_div(self.b - self.a, self.run.moves.nbytes) * self.run.moves.nbytes


@dataclass
class StreamTimes:
    """Seconds that a load waited for the file's bytes and for the device, and those of all of it."""

    read_s: float = 0.0
    upload_s: float = 0.0
    total_s: float = 0.0


class WeightStream:
    """Brings matrices to memory that is there already.

    beyond_f16, coarse, unsound  after `run`: weights with scales that may be too large for f16, or for subnormal f16, and with weights that
                                 are no numbers; by name
    """

    def __init__(self, file: GgufFile, weights: Mapping[Tensor, Sequence[BufferRange]], device: Device, library: ShaderLibrary) -> None:
        """weights: with the memory of their shards. Takes all memory it needs, so that `run` may go in another thread."""
        self.times = StreamTimes()
        self._file, self._device = file, device
        self._flights: list[Commands | None] = [None, None]
        self._undo = ExitStack()
        runs = [run for weight, targets in weights.items() for run in _runs(file, weight, targets, device)]
        least = max(run.step for run in runs)
        self._chunk_bytes = aligned(max(least, min(CHUNK_BYTES, sum(aligned(run.nbytes + run.step) for run in runs))))
        self._chunks = _chunks(sorted(runs, key=lambda run: run.place), self._chunk_bytes)
        self._pieces = [piece for chunk in self._chunks for piece in chunk]
        try:
            self._take_memory(device, library)
        except BaseException:
            self.close()
            raise

    def _take_memory(self, device: Device, library: ShaderLibrary) -> None:
        spirv = library.spirv(REPACK)
        self._kernel = device.kernel(spirv, name=REPACK.name, bindings=BINDINGS, push_bytes=4 * PUSH_WORDS)
        staging = self._arena(device.arena("weights on their way", 2 * self._chunk_bytes, "upload"))
        self._staging = [staging.alloc(self._chunk_bytes, f"chunk {i}") for i in (0, 1)]
        self._result = self._arena(device.arena("flags of weights", aligned(4 * len(self._pieces)), "readback"))
        self._flags_back = self._result.alloc(4 * len(self._pieces), "flags")
        tables = {run.moves.name: run.moves.table for chunk in self._chunks for run in (piece.run for piece in chunk)}
        # Where host and device share memory, the kernel reads what the host wrote.
        shares = device.caps.uma
        sizes = [table.nbytes for table in tables.values()]
        size = sum(map(aligned, sizes)) + aligned(self._flags_back.size) + (0 if shares else self._chunk_bytes)
        arena = self._arena(device.arena("repacking of weights", size, "device"))
        self._tables = {name: arena.alloc(table.nbytes, f"moves of {name}") for name, table in tables.items()}
        self._flags = arena.alloc(self._flags_back.size, "flags")
        self._landing = None if shares else arena.alloc(self._chunk_bytes, "chunk on the device")
        for name, table in tables.items():
            device.upload(self._tables[name], table)
        device.upload(self._flags, np.zeros(len(self._pieces), np.uint32))

    def _arena(self, arena: Arena) -> Arena:
        self._undo.callback(arena.destroy)
        return arena

    def run(self, on_bytes: OnBytes, on_wait: OnWait, stopped: Callable[[], bool]) -> None:
        """Read, copy and repack everything.

        on_bytes  called with the bytes of the file of each chunk
        on_wait   called with what is waited for from now on: "reading" or "uploading"
        stopped   asked before each chunk; the rest is left out
        """
        begun = time.perf_counter()
        with _Reader(self._file) as reader, ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
            for number, chunk in enumerate(self._chunks):
                if stopped():
                    return
                on_wait("reading")
                before = time.perf_counter()
                slot = number % 2
                reads = self._fill(self._staging[slot], chunk, reader, pool)
                commands = self._flights[slot] = self._recorded(self._staging[slot], chunk, last=number == len(self._chunks) - 1)
                for read in reads:
                    read.result()
                self.times.read_s += time.perf_counter() - before
                self._device.submit(commands)
                on_wait("uploading")
                before = time.perf_counter()
                self._land(1 - slot)
                self.times.upload_s += time.perf_counter() - before
                on_bytes(sum(piece.b - piece.a for piece in chunk))
            before = time.perf_counter()
            for slot in (0, 1):
                self._land(slot)
            self.times.upload_s += time.perf_counter() - before
        self.times.total_s = time.perf_counter() - begun

    def raised(self, flag: int) -> list[Tensor]:
        """Weights with pieces that raised one of these flags, once `run` has ended."""
        flags = self._flags_back.map().view(np.uint32)
        return list(dict.fromkeys(piece.run.weight for piece in self._pieces if flags[piece.flag] & flag))

    def beyond_f16(self) -> set[str]:
        """Names of matrices with weights that f16 cannot hold. The flags say where such may be; the host looks there, exactly."""
        flags = self._flags_back.map().view(np.uint32)
        found: set[str] = set()
        for piece in self._pieces:
            run = piece.run
            if flags[piece.flag] & LARGE and run.weight.name not in found:
                raw = self._padded(piece) if run.tensor is None else run.tensor.data.reshape(-1)[run.begin + piece.a : run.begin + piece.b]
                if quants.beyond_f16(run.weight.type, raw.reshape(1, -1)):
                    found.add(run.weight.name)
        return found

    def coarse(self) -> set[str]:
        """Names of matrices with too large a quantization step to be decoded by way of subnormal f16."""
        return {w.name for w in self.raised(COARSE)}

    def unsound(self) -> list[Tensor]:
        """Weights of which some are NaN or infinite."""
        return self.raised(UNSOUND)

    def close(self) -> None:
        """Wait for the device, and give the staging memory back."""
        for slot in (0, 1):
            flight = self._flights[slot]
            if flight is not None:
                flight.destroy()
                self._flights[slot] = None
        self._undo.close()

    def _land(self, slot: int) -> None:
        flight = self._flights[slot]
        if flight is not None:
            flight.wait()
            flight.destroy()
            self._flights[slot] = None

    def _fill(self, slot: BufferRange, chunk: Sequence[_Piece], reader: _Reader, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """Have a chunk read by the threads of a pool."""
        memory = slot.map()
        reads: list[Future[None]] = []
        for piece in chunk:
            size = piece.b - piece.a
            target = memory[piece.at : piece.at + size]
            memory[piece.at + size : piece.at + piece.padded] = 0
            if piece.run.tensor is None:
                reads.append(pool.submit(self._gather, piece, target))
                continue
            begin = piece.run.begin + piece.a
            for at in range(0, size, READ_BYTES):
                reads.append(pool.submit(reader.read, piece.run.tensor, begin + at, target[at : at + READ_BYTES]))
        return reads

    def _gather(self, piece: _Piece, target: Bytes) -> None:
        target[:] = self._padded(piece)

    def _padded(self, piece: _Piece) -> Bytes:
        run = piece.run
        rows = (run.row0 + end // run.row_bytes for end in (piece.a, piece.b))
        raw = gather_rows(self._file, run.weight, *rows)
        return padded_rows(run.weight.type, raw, run.weight.shape[-1]).reshape(-1)

    def _recorded(self, source: BufferRange, chunk: Sequence[_Piece], *, last: bool) -> Commands:
        """What the device does with a chunk, in staging memory by then."""
        rec = self._device.recorder("weights")
        if self._landing is not None:
            used = chunk[-1].at + chunk[-1].padded
            rec.copy(source.slice(0, used), self._landing.slice(0, used))
            rec.barrier()
            source = self._landing
        for piece in chunk:
            self._dispatch(rec, source, piece)
        if last:
            rec.barrier()
            rec.copy(self._flags, self._flags_back)
            rec.host_barrier()
        return rec.finish()

    def _dispatch(self, rec: Recorder, source: BufferRange, piece: _Piece) -> None:
        run, moves = piece.run, piece.run.moves
        groups = piece.padded // moves.nbytes
        tile = SHARED_WORDS // moves.words
        begins = [plane.offset // 4 for plane in run.layout.planes]
        begins += [run.layout.nbytes // 4] * (MAX_PLANES + 1 - len(begins))
        push = pack_push(piece.at // 4, groups, tile, run.first + piece.a // moves.nbytes, *run.in_turn, piece.flag, *begins)
        ranges = [source, self._tables[moves.name], run.target, self._flags]
        rec.dispatch(self._kernel, ranges, push, (ceil_div(groups, tile), 1, 1), f"repack {run.weight.name}")


REPACK = Variant("load/repack.comp")


class _Reader:
    """Reads bytes of tensors into memory, in any thread: by calls of the system where the file is there, which neither counts its pages as
    this process's nor ends it where the file has become shorter."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._descriptors: dict[int, int] = {}
        """Of each file, by the identity of its mapped bytes."""
        self._by_calls = hasattr(os, "preadv")

    def __enter__(self) -> _Reader:
        if self._by_calls:
            try:
                for one in self._file.files:
                    self._descriptors[id(one.mapped)] = one.reopened()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, tensor: GgufTensor, begin: int, target: npt.NDArray[np.uint8]) -> None:
        """Bytes of a tensor from `begin` on."""
        at = tensor.offset + begin
        if self._by_calls and (fd := self._descriptors.get(id(tensor.file))) is not None:
            try:
                self._call(fd, tensor, at, target)
                return
            except OSError as e:
                if e.errno != errno.EFAULT:
                    raise GgufError(f"[gguf] {self._file.where(tensor.name)}: tensor {tensor.name}: cannot be read: {e.strerror}") from e
                self._by_calls = False  # a system that does not write into memory of a driver
        target[:] = tensor.file[at : at + target.size]

    def _call(self, fd: int, tensor: GgufTensor, at: int, target: npt.NDArray[np.uint8]) -> None:
        done = 0
        while done < target.size:
            got = os.preadv(fd, [target[done:].data], at + done)
            if not got:
                raise GgufError(
                    f"[gguf] {self._file.where(tensor.name)}: tensor {tensor.name}: the file ends at byte {at + done} now, it was longer "
                    "when it was opened. Fetch it again"
                )
            done += got


def _runs(file: GgufFile, weight: Tensor, targets: Sequence[BufferRange], device: Device) -> Iterator[_Run]:
    k = weight.shape[-1]
    moves = word_moves(stored_type(weight.type, k, device.caps))
    row_bytes = quants.row_bytes(weight.type, k)
    padded = quants.layout(weight.type, 1, k)
    row_padded = sum(plane.row_bytes for plane in padded.planes)
    names, recipe = sources(weight), weight.recipe
    in_turn_by_rows = recipe is not None and recipe.how == "interleave" and len(names) > 1
    as_they_lie = len(names) == 1 or (row_padded % moves.nbytes == 0 and (in_turn_by_rows or len(weight.shape) == 2))
    for shard, target in zip(shards(weight, device.caps), targets, strict=True):
        a, b = shard.row0, shard.row0 + shard.rows
        if row_padded != row_bytes or not as_they_lie:
            yield _Run(weight, moves, target, shard.layout, shard.rows * row_padded, row0=a, row_bytes=row_padded)
            continue
        start = 0
        for s, name in enumerate(names):
            tensor = file.tensors[name]
            rows = prod(tensor.shape[:-1])
            if in_turn_by_rows:
                count = len(names)
                first, last = ceil_div(a - s, count), ceil_div(b - s, count)
                in_turn, at = (row_bytes // moves.nbytes, count, first * count + s - a), 0
            else:
                first, last = max(a, start) - start, min(b, start + rows) - start
                in_turn, at = (0, 0, 0), (start + first - a) * row_bytes // moves.nbytes
                start += rows
            if first < last:
                size = (last - first) * row_bytes
                yield _Run(weight, moves, target, shard.layout, size, tensor, first * row_bytes, at, in_turn)


def _chunks(runs: Sequence[_Run], chunk_bytes: int) -> list[list[_Piece]]:
    """Runs cut into pieces of whole groups (gathered ones: of rows that make whole groups), and pieces put together to chunks."""
    chunks: list[list[_Piece]] = [[]]
    used = flag = 0
    for run in runs:
        a = 0
        while a < run.nbytes:
            room = (chunk_bytes - used) // run.step * run.step
            if room < min(run.nbytes - a, max(run.step, READ_BYTES)) and used:
                chunks.append([])
                used = 0
                continue
            b = min(run.nbytes, a + room)
            chunks[-1].append(_Piece(run, a, b, used, flag))
            used += aligned(chunks[-1][-1].padded)
            flag += 1
            a = b
    return [chunk for chunk in chunks if chunk]

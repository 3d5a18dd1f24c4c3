"""Weights from the file into device memory: combined by recipe, repacked by row chunks in threads, streamed through the uploader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from vkback import quants
from vkback.device import Arena, BufferRange, Device
from vkback.graph import Tensor
from vkback.models.gguf_file import GgufError, GgufFile
from vkback.ops.base import shards
from vkback.plan.schedule import aligned
from vkback.program import WeightRanges

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
"""File bytes repacked at a time: a few of these fit the caches, and one is large enough for the upload."""


@dataclass(frozen=True)
class _Piece:
    """Rows of one shard, repacked: where each plane's bytes go."""

    weight: str
    target: BufferRange
    planes: list[tuple[int, Bytes]]
    file_bytes: int
    beyond_f16: bool


class LoadedWeights(NamedTuple):
    """arena holds all of them, and the caller destroys it; ranges has every weight's shards; beyond_f16 names matrices with weights that
    f16 cannot hold."""

    arena: Arena
    ranges: dict[str, WeightRanges]
    beyond_f16: frozenset[str]


def device_bytes(weight: Tensor, device: Device) -> int:
    """Bytes a weight takes in device memory, each shard aligned."""
    if len(weight.shape) == 1:
        return aligned(4 * weight.shape[0])
    return sum(aligned(s.layout.nbytes) for s in shards(weight, device.caps))


def load_weights(file: GgufFile, weights: Mapping[str, Tensor], device: Device, *, progress: bool = True) -> LoadedWeights:
    """Bring weights to the device.

    weights  by name, with the recipes that say which tensors of the file make them
    The size is known before anything is asked for. Raises GgufError naming a tensor with weights that are not numbers.
    """
    total = sum(device_bytes(w, device) for w in weights.values())
    arena = device.arena("weights", total, "device")
    ranges: dict[str, WeightRanges] = {}
    beyond_f16: set[str] = set()
    uploader = device.uploader()
    console = Console(stderr=True)
    with (
        contextlib.ExitStack() as undo,
        Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not (progress and console.is_terminal),
        ) as bar,
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
    ):
        undo.callback(arena.destroy)
        undo.callback(uploader.finish)
        task = bar.add_task("weights", total=sum(_file_bytes(file, w) for w in weights.values()))
        jobs: list[tuple[Any, ...]] = []
        for w in weights.values():
            if len(w.shape) == 1:
                block = arena.alloc(4 * w.shape[0], w.name)
                vector = vector_values(file, w)
                uploader.write(block, 0, vector.view(np.uint8))
                ranges[w.name] = WeightRanges((block,))
                bar.advance(task, vector.nbytes)
                continue
            blocks = [arena.alloc(s.layout.nbytes, w.name) for s in shards(w, device.caps)]
            ranges[w.name] = WeightRanges(tuple(blocks))
            jobs.extend((file, w, block, s.row0, s.rows, s.layout, a, b) for s, block in zip(shards(w, device.caps), blocks, strict=True)
                        for a, b in _chunks(s.rows, w))
        for piece in _in_order(pool, jobs):
            for offset, data in piece.planes:
                uploader.write(piece.target, offset, data)
            if piece.beyond_f16:
                beyond_f16.add(piece.weight)
            bar.advance(task, piece.file_bytes)
        uploader.finish()
        undo.pop_all()
    return LoadedWeights(arena, ranges, frozenset(beyond_f16))


def _sources(weight: Tensor) -> tuple[str, ...]:
    return weight.recipe.sources if weight.recipe else (weight.name,)


def _file_bytes(file: GgufFile, weight: Tensor) -> int:
    return sum(file.tensors[s].nbytes for s in _sources(weight))


def vector_values(file: GgufFile, weight: Tensor) -> npt.NDArray[np.float32]:
    """The values of a weight of one axis; what has more in the file (the experts' biases) lies end to end."""
    found = [file.tensors[s] for s in _sources(weight)]
    parts = [np.asarray(quants.decode(t.type, np.asarray(t.data).reshape(-1)), np.float32).ravel() for t in found]
    if not all(np.isfinite(part).all() for part in parts):
        raise _not_numbers(file, weight)
    if weight.recipe is not None and weight.recipe.how == "interleave":
        return np.stack(parts, axis=-1).ravel()
    whole = np.concatenate(parts)
    return whole if weight.recipe is None else whole * np.float32(weight.recipe.scale)


def _not_numbers(file: GgufFile, weight: Tensor) -> GgufError:
    """Which tensor of a weight holds something else than numbers."""
    for source in _sources(weight):
        t = file.tensors[source]
        row = quants.unsound_row(t.type, t.data)
        if row is not None:
            where = f"row {t.row0 + row}" if len(t.shape) > 1 else "it"
            return GgufError(
                f"[gguf] {file.path}: tensor {t.name} ({t.type} {list(t.shape)}): {where} holds weights that are NaN or infinite. "
                "The file is damaged, or was made from a damaged model: fetch it again, or convert the model anew"
            )
    raise AssertionError(f"{weight.name}: all weights are numbers")


def _chunks(rows: int, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges of about CHUNK_BYTES, in multiples of 64 rows so that planes of single bytes start on words."""
    per_row = max(1, quants.row_bytes(weight.type, weight.shape[-1]))
    step = max(64, CHUNK_BYTES // per_row // 64 * 64)
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


def _in_order(pool: ThreadPoolExecutor, jobs: Iterable[tuple[Any, ...]]) -> Iterator[_Piece]:
    """Results of _repack in the jobs' order, with a bounded number under way so that the host never holds a second copy of the model."""
    pending = iter(jobs)
    under_way: list[Future[_Piece]] = [pool.submit(_repack, *job) for job in islice(pending, 24)]
    while under_way:
        piece = under_way.pop(0).result()
        under_way.extend(pool.submit(_repack, *job) for job in islice(pending, 1))
        yield piece


def _repack(
    file: GgufFile, weight: Tensor, target: BufferRange, shard_row0: int, shard_rows: int, layout: quants.DeviceLayout, a: int, b: int
) -> _Piece:
    raw = gather_rows(file, weight, shard_row0 + a, shard_row0 + b)
    if quants.unsound_row(weight.type, raw) is not None:
        raise _not_numbers(file, weight)
    planes = quants.repack(weight.type, raw, weight.shape[-1])
    return _Piece(
        weight.name,
        target,
        [(where.offset + a * where.row_bytes, np.ascontiguousarray(p).reshape(-1)) for where, p in zip(layout.planes, planes, strict=True)],
        raw.nbytes,
        quants.beyond_f16(weight.type, raw),
    )


def gather_rows(file: GgufFile, weight: Tensor, a: int, b: int) -> Bytes:
    """Rows a..b (experts flattened) of a weight as its recipe combines them, in file bytes [b - a, row_bytes]."""
    recipe = weight.recipe
    names = _sources(weight)
    data = [file.tensors[n].data for n in names]
    if recipe is None or len(names) == 1:
        return np.ascontiguousarray(data[0][a:b])
    if recipe.how == "interleave":
        count = len(data)
        out = np.empty((b - a, data[0].shape[1]), np.uint8)
        for s, source in enumerate(data):
            first = -(-(a - s) // count)
            last = -(-(b - s) // count)
            out[first * count + s - a :: count] = source[first:last]
        return out
    if len(weight.shape) > 2:
        raise ValueError(f"{weight}: experts are not stacked by rows")
    parts: list[Bytes] = []
    start = 0
    for source in data:
        end = start + prod(source.shape[:1])
        if max(a, start) < min(b, end):
            parts.append(source[max(a, start) - start : min(b, end) - start])
        start = end
    return np.concatenate(parts)

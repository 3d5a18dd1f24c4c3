"""The device layout of weights: planes of a tensor, one after another, each holding all rows; docs/weight_layout.md has the table.

A row's planes follow from its blocks alone, so rows can be repacked in any cut and order, by any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkback.quants.codec import Codec
from vkback.quants.quant_type import UNIT, Plane, QuantShapeError, QuantType
from vkback.quants.registry import codec

U8 = npt.NDArray[np.uint8]

ALIGNMENT = 16
_CHUNK_BYTES = 1 << 19
"""Blocks repacked at once: enough that numpy's cost per call vanishes, few enough for a second-level cache."""


class PlaneLayout(NamedTuple):
    """Where a plane lies: byte offset in the tensor, bytes of one row."""

    name: str
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class DeviceLayout:
    """A tensor of `rows` rows on the device.

    planes       in order, each on 16 bytes
    nbytes       of all of it, a multiple of 16
    part_stride  bytes from one 16-byte part of the weights to the next, for types that have several; else 0
    """

    planes: tuple[PlaneLayout, ...]
    nbytes: int
    part_stride: int


def _device_planes(t: QuantType) -> tuple[Plane, ...]:
    if not t.planes:
        raise QuantShapeError(f"[quants] {t.name} has no device layout for weights; activations use q8_1_quantize")
    return t.planes


def group_values(t: QuantType) -> int:
    """Weights repacked together: a block, or a unit where blocks are smaller."""
    return max(t.block_values, UNIT)


def _padded(t: QuantType, k: int) -> int:
    t.row_bytes(k)
    group = group_values(t)
    return -(-k // group) * group


@lru_cache(4096)
def layout(name: str, rows: int, k: int) -> DeviceLayout:
    """Planes of a tensor of `rows` rows of k weights. Raises QuantShapeError when k does not divide into blocks."""
    t = codec(name).type
    values = _padded(t, k)
    places = []
    offset = 0
    for plane in _device_planes(t):
        width = values // plane.values * plane.nbytes
        places.append(PlaneLayout(plane.name, offset, width))
        offset += -(-rows * width // ALIGNMENT) * ALIGNMENT
    parts = [p for p, plane in zip(places, t.planes, strict=True) if (plane.nbytes, plane.values) == (16, t.planes[0].values)]
    return DeviceLayout(tuple(places), offset, parts[1].offset - parts[0].offset if len(parts) > 1 else 0)


def _plane_rows(t: QuantType, k: int) -> list[int]:
    values = _padded(t, k)
    return [values // p.values * p.nbytes for p in _device_planes(t)]


def _copy(dst: U8, src: U8) -> None:
    """[n, m] bytes; moved as n items of m bytes, which is many times faster than n * m bytes."""
    item = np.dtype((np.void, src.shape[1]))
    dst.view(item)[...] = src.view(item)


def padded_rows(name: str, raw: U8, k: int) -> U8:
    """Rows of the file with zeros up to whole units."""
    t = codec(name).type
    missing = (_padded(t, k) - k) * t.block_bytes
    if missing:
        raw = np.pad(raw, ((0, 0), (0, missing)))
    return np.ascontiguousarray(raw)


def _group_planes(planes: Sequence[U8], groups: int) -> list[U8]:
    """Planes as [groups, bytes per group]."""
    return [p.reshape(groups, -1) for p in planes]


def _chunks(groups: int, group_bytes: int) -> list[slice]:
    size = max(1, _CHUNK_BYTES // group_bytes)
    return [slice(start, start + size) for start in range(0, groups, size)]


def repack(name: str, raw: npt.NDArray[np.uint8], k: int, out: Sequence[U8] | None = None) -> list[U8]:
    """Rows of the file, uint8 [rows, row_bytes], as planes: one uint8 [rows, plane_row_bytes] each.

    out  arrays to fill instead of new ones, C-contiguous, for instance slices of mapped memory
    """
    c = codec(name)
    t = c.type
    widths = _plane_rows(t, k)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != t.row_bytes(k):
        raise QuantShapeError(f"[quants] {name} rows of {k} weights are uint8 [rows, {t.row_bytes(k)}], got {raw.dtype} {list(raw.shape)}")
    planes = [np.empty((len(raw), w), np.uint8) for w in widths] if out is None else list(out)
    for plane, array, width in zip(t.planes, planes, widths, strict=True):
        if array.shape != (len(raw), width) or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise QuantShapeError(
                f"[quants] {name} plane {plane.name} takes contiguous uint8 [{len(raw)}, {width}], got {array.dtype} {list(array.shape)}"
            )
    blocks = padded_rows(name, raw, k).reshape(-1, c.block.itemsize)
    targets = _group_planes(planes, len(blocks))
    for part in _chunks(len(blocks), c.block.itemsize):
        blocks_to_planes(c, blocks[part], [target[part] for target in targets])
    return planes


def blocks_to_planes(c: Codec, blocks: U8, targets: Sequence[U8], *, names: bool = True) -> None:
    """Blocks [n, bytes] into planes [n, bytes each]. Without `names` nibbles keep those of the file (`Rearrange.renamed`)."""
    fields = c.fields(blocks)
    for plane, target in zip(c.type.planes, targets, strict=True):
        move = c.moves.get(plane.name)
        if move is None:
            _copy(target, fields[plane.name])
        elif move.bits is None or names:
            move.to_device(fields[plane.name], target)
        else:
            move.bits(fields[plane.name], target)
    if c.weave:
        c.weave.to_device({plane.name: target for plane, target in zip(c.type.planes, targets, strict=True)})


def unpack(name: str, planes: Sequence[npt.NDArray[np.uint8]], k: int) -> U8:
    """Exact inverse of `repack`: planes, uint8 [rows, plane_row_bytes], as rows of the file, uint8 [rows, row_bytes]."""
    c = codec(name)
    t = c.type
    widths = _plane_rows(t, k)
    if [p.shape[1:] for p in planes] != [(w,) for w in widths] or len({len(p) for p in planes}) != 1:
        got = ", ".join(str(list(p.shape)) for p in planes)
        raise QuantShapeError(f"[quants] {name} rows of {k} weights are planes {[p.name for p in t.planes]} of {widths} bytes, got {got}")
    rows = len(planes[0])
    blocks = np.empty((rows * _padded(t, k) // group_values(t), c.block.itemsize), np.uint8)
    sources = _group_planes([np.ascontiguousarray(p) for p in planes], len(blocks))
    for part in _chunks(len(blocks), c.block.itemsize):
        fields = c.fields(blocks[part])
        pieces = {p.name: source[part] for p, source in zip(t.planes, sources, strict=True)}
        if c.weave:
            pieces |= {name: pieces[name].copy() for name in c.weave.planes}
            c.weave.to_file(pieces)
        for name, piece in pieces.items():
            move = c.moves.get(name)
            if move is None:
                _copy(fields[name], piece)
            else:
                move.to_file(piece, fields[name])
    return np.ascontiguousarray(blocks.reshape(rows, -1)[:, : t.row_bytes(k)])


def to_device(name: str, raw: npt.NDArray[np.uint8], k: int) -> U8:
    """Rows of the file, uint8 [rows, row_bytes], as the tensor's bytes on the device, uint8 [layout(...).nbytes]."""
    rows = len(raw)
    place = layout(name, rows, k)
    tensor = np.empty(place.nbytes, np.uint8)
    planes = [tensor[p.offset : p.offset + rows * p.row_bytes].reshape(rows, p.row_bytes) for p in place.planes]
    repack(name, raw, k, out=planes)
    ends = [p.offset for p in place.planes[1:]] + [place.nbytes]
    for p, end in zip(place.planes, ends, strict=True):
        tensor[p.offset + rows * p.row_bytes : end] = 0
    return tensor

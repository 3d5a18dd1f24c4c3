"""Writing GGUF files: keys with values as bytes, so that those of another file are copied as they are, and tensors one after another."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from vkback.gguf.file import DEFAULT_ALIGNMENT, MAGIC, TENSOR_TYPES, tensor_bytes

VERSION = 3

_NUMBERS = {block.name: number for number, block in TENSOR_TYPES.items()}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


def _text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Value) -> bytes:
    """A key with its value: a bool, an int (u32, or i32 where it is negative), a float (f32), text, or a list of texts, ints or floats."""
    if isinstance(value, bool):
        return _text(key) + struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<Ii" if value < 0 else "<II", _I32 if value < 0 else _U32, value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    if value and isinstance(value[0], str):
        return _text(key) + struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_text(str(v)) for v in value)
    kind, form = (_F32, "f") if value and isinstance(value[0], float) else (_I32, "i")
    return _text(key) + struct.pack("<IIQ", _ARRAY, kind, len(value)) + struct.pack(f"<{len(value)}{form}", *value)


def end_of(offset: int, nbytes: int, alignment: int) -> int:
    """Where the next tensor begins."""
    return offset + -(-nbytes // alignment) * alignment


def data_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes of the data of a file with tensors of such types and shapes, each with the padding behind it."""
    at = 0
    for type, shape in tensors:
        at = end_of(at, tensor_bytes(type, shape), alignment)
    return at


class GgufWriter:
    """A file that is written from its beginning to its end: the tables at once, then the data of each tensor in their order. Use as a
    context manager."""

    def __init__(
        self, path: Path, entries: Sequence[bytes], tensors: Sequence[tuple[str, str, tuple[int, ...]]], alignment: int = DEFAULT_ALIGNMENT
    ) -> None:
        """entries: made by `entry` or of another file; tensors: (name, type, shape in numpy order). Raises OSError."""
        self._alignment = alignment
        self._sizes = [tensor_bytes(type, shape) for _, type, shape in tensors]
        self._written = 0
        head = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries)), *entries]
        at = 0
        for (name, type, shape), size in zip(tensors, self._sizes, strict=True):
            head.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], _NUMBERS[type], at))
            at = end_of(at, size, alignment)
        self._file: BinaryIO = path.open("wb")
        tables = b"".join(head)
        self._file.write(tables + bytes(-len(tables) % alignment))

    def write(self, *pieces: npt.NDArray[np.uint8] | bytes) -> None:
        """Bytes of the tensor that comes next, or more of it; padding follows its last byte. Raises OSError, and ValueError for bytes that
        no tensor has."""
        for piece in pieces:
            size = piece.nbytes if isinstance(piece, np.ndarray) else len(piece)
            if not size:
                continue
            self._skip_empty()
            if not self._sizes or self._written + size > self._sizes[0]:
                raise ValueError("more bytes than the tensor has")
            self._file.write(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else piece)
            self._written += size
            if self._written == self._sizes[0]:
                self._file.write(bytes(-self._written % self._alignment))
                self._written = 0
                del self._sizes[0]

    def _skip_empty(self) -> None:
        while self._sizes and not self._sizes[0]:
            del self._sizes[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._skip_empty()
        if kind is None and self._sizes:
            raise ValueError(f"{len(self._sizes)} tensors are not written")

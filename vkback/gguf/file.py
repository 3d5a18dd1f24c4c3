"""GGUF files: header, metadata and tensor table, every length checked before it is trusted; tensor data stays mapped.

A model may be split into several files, NAME-00001-of-00003.gguf and so on. The first has the metadata, each some of the tensors; all have
`split.no` (from 0), `split.count` and `split.tensors.count`, the number of tensors of all.

Written by hand because the `gguf` package's reader takes seconds on vocabularies of 128k tokens and answers a broken file with a numpy
error. Layout: magic, version u32, tensor count u64, key count u64, keys, tensor infos, padding, data; all little endian.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.errors import VkbackError
from vkback.graph import part_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
"""Real files nest arrays once; a limit keeps a broken file from exhausting the stack."""
MAX_NAME_BYTES = 63
"""Of a tensor: what ggml has room for."""
MAX_QUOTED = 80
MAX_SPLIT_TENSORS = (1 << 31) - 1
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
"""The name of a file of a split model."""

T = TypeVar("T")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {code: struct.Struct("<" + fmt) for code, fmt in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_MIN_VALUE_BYTES = {**{code: s.size for code, s in _STRUCTS.items()}, _STRING: 8, _ARRAY: 12}


class GgufError(VkbackError):
    """A file that is no sound GGUF, or that lacks what its architecture needs. The text begins with the file's name."""


class NotGguf(GgufError):  # noqa: N818  what it says is enough
    """A file of another format: it was named by mistake."""

    exit_code = 2


def split_name(stem: str, number: int, count: int) -> str:
    """The name of file `number`, from 1, of a model split into `count`."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def files_beside(path: Path) -> list[Path]:
    """The files of a split model by the name of one of them; of another file it alone."""
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    return [path.with_name(split_name(name["stem"], number, int(name["count"]))) for number in range(1, int(name["count"]) + 1)]


def quoted(value: object) -> str:
    """A name or value of a file for an error text: on one line, and of bounded length."""
    text = value if isinstance(value, str) else " ".join(str(value).split())
    text = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
    return repr(text) if isinstance(value, str) else text


@dataclass(frozen=True)
class BlockSize:
    """A tensor type of the format: its name, and how many values one block of how many bytes holds."""

    name: str
    values: int
    nbytes: int


def _block_sizes() -> dict[int, BlockSize]:
    sizes = {t.ggml_id: BlockSize(t.name, t.block_values, t.block_bytes) for t in quants.QUANTS.values()}
    return sizes | {
        15: BlockSize("Q8_K", 256, 292),
        24: BlockSize("I8", 1, 1),
        25: BlockSize("I16", 1, 2),
        26: BlockSize("I32", 1, 4),
        27: BlockSize("I64", 1, 8),
        28: BlockSize("F64", 1, 8),
    }


TENSOR_TYPES = _block_sizes()
"""Every tensor type of the format by its number in a file."""


def tensor_bytes(type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file. Raises KeyError for a type the format does not have."""
    block = _BY_NAME[type]
    return prod(shape) // block.values * block.nbytes


_BY_NAME = {b.name: b for b in TENSOR_TYPES.values()}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    name    as in the file, also of a part that `GgufFile.cut` made
    shape   numpy order: [rows, cols], [n_expert, rows, cols] or [n]
    offset  of its first byte, from the start of the file
    row0    first row of a part
    made    it is no tensor of the file: `GgufFile.with_made` added it, or it is of another one beside it
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: npt.NDArray[np.uint8]
    row0: int = 0
    made: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """uint8 [rows with experts flattened, bytes of a row], a view of the mapped file: nothing is read until it is used. A tensor may
        have no values."""
        rows = prod(self.shape[:-1])
        if not self.elements:
            return np.empty((rows, 0), np.uint8)
        return self.file[self.offset : self.offset + self.nbytes].reshape(rows, self.nbytes // rows)


@dataclass(frozen=True)
class SplitFile:
    """One file of a model: where it is, what tells it from another of its name (device, number, size, time of change), and its bytes."""

    path: Path
    stamp: tuple[int, ...]
    mapped: npt.NDArray[np.uint8] = field(repr=False, compare=False)

    def reopened(self) -> int:
        """A descriptor of the file, which the caller closes. Raises GgufError where another file or another content has its name now."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as e:
            raise GgufError(f"[gguf] {self.path}: cannot be read: {e.strerror}") from e
        if _stamp(fd) != self.stamp:
            os.close(fd)
            raise GgufError(f"[gguf] {self.path}: the file has changed since it was opened. Load it again")
        return fd


@dataclass(frozen=True)
class GgufFile:
    """An open model, of one file or of several; `path` is the first.

    metadata  str, int, float, bool, list[str] and numpy arrays by key
    tensors   in the order of the files
    joined    weights that several parts make, stacked in their order (`deinterleave`)
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    files: tuple[SplitFile, ...] = ()
    """Those that it consists of, and what drafts beside it; tensors of another one, as an adapter's, have other bytes."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entries: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where each key of the metadata lies in the first file, with its value: first byte, and that behind the last."""

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map a file, with those that follow it where a model is split, and read its tables. Raises GgufError, naming the file and the
        place, on anything unsound, and naming a file of a split model that is missing or of another one."""
        first = cls._open(Path(path))
        count = first.split("count")
        return first if count < 2 else first._joined(count)

    @classmethod
    def _open(cls, path: Path) -> GgufFile:
        try:
            with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as head:
                parsed = _Parser(path, head).parse()
                mapped = np.memmap(f, dtype=np.uint8, mode="r")
                stamp = _stamp(f.fileno())
        except (OSError, ValueError) as e:
            # mmap refuses an empty file with ValueError.
            reason = "the file is empty" if isinstance(e, ValueError) else str(e.strerror or e)
            raise GgufError(f"[gguf] {path}: cannot be read: {reason}") from e
        return cls._of(path, parsed, mapped, stamp)

    @classmethod
    def outline(cls, path: Path, head: bytes, size: int) -> GgufFile:
        """A file that is nowhere: `head` is its metadata and tables, and zeros make it `size` bytes long. path: what errors call it.
        Raises GgufError as `open` does."""
        return cls._of(path, _Parser(path, head, size).parse(), np.broadcast_to(np.uint8(0), size), ())

    @classmethod
    def _of(cls, path: Path, parsed: _Parsed, mapped: npt.NDArray[np.uint8], stamp: tuple[int, ...]) -> GgufFile:
        tensors = {t.name: GgufTensor(t.name, t.type, t.shape, t.offset, t.nbytes, mapped) for t in parsed.tensors}
        files = (SplitFile(path, stamp, mapped),)
        return cls(path, parsed.version, parsed.alignment, parsed.metadata, tensors, files, entries=parsed.entries)

    def entry(self, key: str) -> bytes:
        """A key of the metadata with its value, as the file has them. Raises KeyError."""
        begin, end = self.entries[key]
        return self.files[0].mapped[begin:end].tobytes()

    def split(self, name: str) -> int:
        """`split.no`, `split.count` or `split.tensors.count`, 0 where the file has none. Raises GgufError."""
        value = self.get(f"split.{name}", int, 0)
        if not 0 <= value <= MAX_SPLIT_TENSORS:
            raise GgufError(f"[gguf] {self.path}: metadata key split.{name} is {value}, expected 0 to {MAX_SPLIT_TENSORS}")
        return value

    def _joined(self, count: int) -> GgufFile:
        """The model whose first file this is, of `count` files."""
        name, no = SPLIT_NAME.fullmatch(self.path.name), self.split("no")
        if no or name is None or (int(name["no"]), int(name["count"])) != (1, count):
            stem = name["stem"] if name else self.path.stem
            expected = "the first" if no == 0 else f"file {no + 1}"
            told = f"[gguf] {self.path}: is {expected} of {count} files of a split model"
            if no:
                raise GgufError(f"{told}; give the first, {split_name(stem, 1, count)}, and the others are found beside it")
            raise GgufError(f"{told}, which are found by their names: call it {split_name(stem, 1, count)}, the others likewise")
        whole, tensors, files = self.split("tensors.count"), dict(self.tensors), list(self.files)
        for number in range(2, count + 1):
            path = self.path.with_name(split_name(name["stem"], number, count))
            told = f"[gguf] {path}: file {number} of {count} of the split model {self.path.name}"
            if not path.is_file():
                raise GgufError(f"{told} is missing. Put all {count} files into one folder")
            part = GgufFile._open(path)
            found = part.split("no") + 1, part.split("count"), part.split("tensors.count")
            if found != (number, count, whole):
                is_, expected = (f"number {n} of {c} with {t} tensors in all" for n, c, t in (found, (number, count, whole)))
                raise GgufError(f"{told} says that it is {is_}, expected {expected}. Is it of another model, or renamed? Fetch it again")
            if part.metadata.get("general.architecture", self.arch) != self.arch or not part.tensors.keys().isdisjoint(tensors):
                twice = next((t for t in part.tensors if t in tensors), "")
                why = f"tensor {twice} is in an earlier one, too" if twice else f"its architecture is {quoted(part.arch)}, not {self.arch}"
                raise GgufError(f"{told} is of another model: {why}. Fetch it again")
            tensors |= part.tensors
            files += part.files
        if len(tensors) != whole:
            raise GgufError(
                f"[gguf] {self.path}: its {count} files have {len(tensors)} tensors, expected {whole} (split.tensors.count). A file is of "
                "another model: fetch them again"
            )
        return replace(self, tensors=tensors, files=tuple(files))

    def where(self, tensor: str) -> Path:
        """The file that has a tensor; the first where none has it."""
        found = self.tensors.get(tensor)
        return next((f.path for f in self.files if found is not None and found.file is f.mapped), self.path)

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return self.get("general.architecture", str)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without padding: the model size that llama-bench prints."""
        return sum(t.nbytes for t in self.tensors.values() if not t.made)

    @cached_property
    def n_params(self) -> int:
        """Values of all tensors."""
        return sum(t.elements for t in self.tensors.values() if not t.made)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a metadata key, of type `kind` (an int serves as float).

        Raises GgufError when it is missing and there is no default, or of another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise GgufError(f"[gguf] {self.path}: metadata key {key} is missing. Convert the model anew")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise GgufError(f"[gguf] {self.path}: metadata key {key} should be {_kind_name(kind)}, the file has {_kind_name(type(value))}")
        return value

    def cut(self, cuts: Mapping[str, Mapping[str, int]]) -> GgufFile:
        """The same file with tensors cut by rows: each name of `cuts` gives way to its parts, name -> rows, in the order of the rows.

        Raises GgufError when the file lacks one, or the rows do not add up to those it has.
        """
        tensors: dict[str, GgufTensor] = {}
        for name, t in self.tensors.items():
            if name not in cuts:
                tensors[name] = t
                continue
            parts = cuts[name]
            if sum(parts.values()) != t.shape[0]:
                expected = [sum(parts.values()), *t.shape[1:]]
                raise GgufError(f"[gguf] {self.path}: tensor {name} has shape {list(t.shape)}, the hyperparameters say {expected}")
            row0 = 0
            for part, rows in parts.items():
                row_bytes = t.nbytes // t.shape[0]
                shape = (rows, *t.shape[1:])
                tensors[part] = GgufTensor(t.name, t.type, shape, t.offset + row0 * row_bytes, rows * row_bytes, t.file, t.row0 + row0)
                row0 += rows
        for name in cuts:
            self.tensor(name)
        return replace(self, tensors=tensors)

    def deinterleave(self, cuts: Mapping[str, tuple[int, Sequence[tuple[str, int]]]]) -> GgufFile:
        """The same file with tensors cut into weights whose rows take turns: name -> (turns, (weight, rows) of a turn in their order). A
        weight, in `joined`, is its rows of all turns; where it has several places in a turn, those of the first place come first.

        Raises GgufError as `cut` does.
        """
        parts: dict[str, dict[str, int]] = {}
        joined: dict[str, list[str]] = {}
        for name, (turns, places) in cuts.items():
            named = [[(part_name(weight, f"{turn}.{i}"), rows) for i, (weight, rows) in enumerate(places)] for turn in range(turns)]
            parts[name] = {part: rows for turn in named for part, rows in turn}
            for i, (weight, _) in enumerate(places):
                joined.setdefault(weight, []).extend(turn[i][0] for turn in named)
        return replace(self.cut(parts), joined={**self.joined, **{weight: tuple(of) for weight, of in joined.items()}})

    def with_made(self, name: str, values: npt.NDArray[np.float32]) -> GgufFile:
        """The same file with an F32 tensor beside its own, which hyperparameters define."""
        tensor = GgufTensor(name, "F32", values.shape, 0, values.nbytes, np.ascontiguousarray(values).view(np.uint8).reshape(-1), made=True)
        return replace(self, tensors={**self.tensors, name: tensor})

    def is_whole(self, name: str) -> bool:
        """Whether a tensor of this name is as the file has it, and no part that `cut` made, which may have the name of the whole."""
        found = self.tensors.get(name)
        return found is not None and [t.name for t in self.tensors.values()].count(name) == 1 and found.name == name

    def tensor(self, name: str) -> GgufTensor:
        """A tensor by name. Raises GgufError when the file lacks it."""
        found = self.tensors.get(name)
        if found is None:
            raise GgufError(f"[gguf] {self.path}: tensor {name} is missing ({len(self.tensors)} tensors in the file)")
        return found


def _stamp(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _kind_name(kind: type) -> str:
    return {str: "a string", int: "an integer", float: "a number", bool: "a bool", list: "a list of strings"}.get(kind, "an array")


@dataclass(frozen=True)
class _Info:
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Parsed:
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: list[_Info]
    entries: dict[str, tuple[int, int]]


class _Parser:
    """A cursor over the mapped file, or the beginning of one. `part` says what is being read, for the error text."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int | None = None) -> None:
        """size: of the file, where `data` is only its beginning."""
        self._path = path
        self._data = data
        self._size = len(data) if size is None else size
        self._at = 0
        self._part = "header"
        self._entries: dict[str, tuple[int, int]] = {}

    def parse(self) -> _Parsed:
        version, n_tensors, n_keys = self._header()
        metadata = self._metadata(n_keys)
        alignment = self._alignment(metadata)
        infos = self._tensor_infos(n_tensors)
        start = -(-self._at // alignment) * alignment
        return _Parsed(version, alignment, metadata, self._place(infos, start, alignment), self._entries)

    def _fail(self, text: str) -> GgufError:
        return GgufError(f"[gguf] {self._path}: {text}")

    def _need(self, nbytes: int) -> int:
        """Claim the next bytes; returns where they begin."""
        begin = self._at
        if begin + nbytes > self._size:
            raise self._fail(
                f"truncated in {self._part}: {nbytes} bytes expected at byte {begin}, the file ends at byte {self._size}. Fetch it again"
            )
        self._at = begin + nbytes
        return begin

    def _unpack(self, s: struct.Struct) -> Any:
        return s.unpack_from(self._data, self._need(s.size))[0]

    def _count(self, what: str, least: int) -> int:
        """A u64 count of things that take at least `least` bytes each."""
        n: int = self._unpack(_U64)
        room = (self._size - self._at) // least
        if n > room:
            raise self._fail(
                f"{self._part} says {n} {what}, the {self._size - self._at} bytes left in the file hold at most {room}. "
                "The file is broken or truncated"
            )
        return n

    def _string(self) -> str:
        n = self._count("characters of a string", 1)
        begin = self._need(n)
        return self._data[begin : begin + n].decode("utf-8", errors="replace")

    def _header(self) -> tuple[int, int, int]:
        magic = self._data[:4]
        if magic != MAGIC:
            how = "; `vkback convert` writes its folder as one" if self._path.suffix == ".safetensors" else ""
            raise NotGguf(f"[gguf] {self._path}: not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}{how}")
        self._at = 4
        version = self._unpack(_U32)
        if version & 0xFFFF == 0 and version:
            raise self._fail("the file is big-endian; only little-endian GGUF files can be read. Convert it with gguf_convert_endian.py")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise self._fail(f"GGUF version {version}, only {known} can be read. Convert the model anew")
        return version, self._count("tensors", _MIN_TENSOR_BYTES), self._count("metadata keys", _MIN_KEY_BYTES)

    def _metadata(self, n_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            self._part = f"metadata key {i} of {n_keys}"
            begin = self._at
            key = self._string()
            self._part = f"metadata key {quoted(key)}"
            if key in metadata:
                raise self._fail(f"{self._part} comes twice")
            metadata[key] = self._value(self._unpack(_U32), depth=0)
            self._entries[key] = begin, self._at
        return metadata

    def _value(self, code: int, depth: int) -> Any:
        if code == _BOOL:
            return bool(self._unpack(_STRUCTS[code]))
        if code in _STRUCTS:
            return self._unpack(_STRUCTS[code])
        if code == _STRING:
            return self._string()
        if code == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise self._fail(
            f"{self._part} has value type {code} at byte {self._at - 4}, known are 0 to {max(_STRUCTS)}, "
            f"arrays at most {MAX_ARRAY_DEPTH} deep"
        )

    def _array(self, depth: int) -> Any:
        code = self._unpack(_U32)
        n = self._count("elements", _MIN_VALUE_BYTES.get(code, 1))
        if code in _STRUCTS:
            dtype = np.dtype(bool) if code == _BOOL else np.dtype("<" + _SCALARS[code])
            return np.frombuffer(self._data, dtype, n, self._need(n * dtype.itemsize)).copy()
        if code == _STRING:
            return self._strings(n)
        return [self._value(code, depth + 1) for _ in range(n)]

    def _strings(self, n: int) -> list[str]:
        # The hot loop of a file with a vocabulary: hundreds of thousands of short strings.
        data, size, at = self._data, self._size, self._at
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        out: list[str] = []
        for _ in range(n):
            end = at + 8
            if end <= size:
                end += unpack(data, at)[0]
            if end > size:
                raise self._fail(
                    f"truncated in {self._part}: string {len(out)} of {n} begins at byte {at} and would end at byte {end}, "
                    f"the file ends at byte {size}. Fetch it again"
                )
            out.append(data[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        self._at = at
        return out

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._fail(f"general.alignment is {quoted(alignment)}, expected a power of two")
        return alignment

    def _tensor_infos(self, n: int) -> list[_Info]:
        infos: dict[str, _Info] = {}
        for i in range(n):
            self._part = f"tensor info {i} of {n}"
            name = self._string()
            if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
                raise self._fail(f"{self._part} has the name {quoted(name)}, expected at most {MAX_NAME_BYTES} bytes that can be printed")
            if name in infos:
                raise self._fail(f"tensor {name!r} comes twice")
            infos[name] = self._tensor_info(name)
        return list(infos.values())

    def _tensor_info(self, name: str) -> _Info:
        n_dims = self._unpack(_U32)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._fail(f"tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(self._unpack(_U64) for _ in range(n_dims))[::-1]
        code = self._unpack(_U32)
        offset = self._unpack(_U64)
        block = TENSOR_TYPES.get(code)
        if block is None:
            known = ", ".join(f"{b.name} ({i})" for i, b in sorted(TENSOR_TYPES.items()))
            raise self._fail(f"tensor {name!r} has type {code}, known are {known}")
        if shape[-1] % block.values:
            raise self._fail(f"tensor {name!r}: {shape[-1]} columns is not a multiple of the {block.name} block ({block.values})")
        return _Info(name, block.name, shape, offset, prod(shape) // block.values * block.nbytes)

    def _place(self, infos: list[_Info], start: int, alignment: int) -> list[_Info]:
        """Absolute offsets; tensors must be aligned, inside the file, and apart from each other."""
        placed = []
        for t in infos:
            if t.offset % alignment:
                raise self._fail(f"tensor {t.name!r} begins at offset {t.offset}, not a multiple of the alignment {alignment}")
            end = start + t.offset + t.nbytes
            if end > self._size:
                raise self._fail(
                    f"truncated: tensor {t.name!r} ({t.type} {list(t.shape)}) ends at byte {end}, the file has {self._size} "
                    "bytes. Fetch it again"
                )
            placed.append(_Info(t.name, t.type, t.shape, start + t.offset, t.nbytes))
        by_offset = sorted(placed, key=lambda t: (t.offset, t.nbytes))
        for a, b in pairwise(by_offset):
            if b.offset < a.offset + a.nbytes:
                raise self._fail(
                    f"tensors {a.name!r} and {b.name!r} overlap: the first ends at byte {a.offset + a.nbytes}, "
                    f"the second begins at byte {b.offset}"
                )
        return placed

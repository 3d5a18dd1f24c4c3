"""Safetensors folders as models are published: config.json and tensors, in one file or several by an index. Tensors stay mapped.

A file: length of the header u64, header (JSON: name -> dtype, shape, data_offsets), data; all little endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.errors import VkbackError

BYTES = "U8"
"""Of tensors that are no numbers, but the blocks of quantized ones."""

TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", BYTES: BYTES}
"""Types that are read, and what GGUF calls them."""

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20


class FolderError(VkbackError):
    """A folder that lacks a file, or has a broken one. The text begins with its name."""

    exit_code = 2


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder; shape in numpy order."""

    name: str
    type: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]

    def rows(self, wanted: Any = slice(None)) -> npt.NDArray[np.float32]:
        """Rows along the first axis as float32; wanted: a slice or their numbers."""
        width = self.raw.size // self.shape[0]
        picked = np.ascontiguousarray(self.raw.reshape(self.shape[0], width)[wanted])
        return quants.decode(self.type, picked).reshape(len(picked), *self.shape[1:])


def read_json(path: Path, *, missing: str = "") -> dict[str, Any]:
    """An object. missing: what to say where there is no file; "": then it is empty. Raises FolderError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing:
            raise FolderError(f"[convert] {path}: no such file; {missing}") from None
        return {}
    except (OSError, ValueError) as e:
        raise FolderError(f"[convert] {path}: cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise FolderError(f"[convert] {path}: expected a JSON object, got {type(found).__name__}")
    return found


def read_folder(folder: Path) -> dict[str, Stored]:
    """All tensors by name. Raises FolderError naming a file that is missing or broken."""
    index = read_json(folder / INDEX)
    if index:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise FolderError(f"[convert] {folder / INDEX}: has no weight_map; fetch it again")
        names = sorted({str(name) for name in weight_map.values()})
        lacking = next((name for name in names if not (folder / name).is_file()), None)
        if lacking:
            raise FolderError(f"[convert] {folder / lacking}: no such file, one of {len(names)} that {INDEX} names; fetch it")
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise FolderError(f"[convert] {folder}: has no *.safetensors; give the folder of a published model")
    found: dict[str, Stored] = {}
    for name in names:
        found |= read_file(folder / name)
    return found


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises FolderError."""

    def fail(why: str) -> FolderError:
        return FolderError(f"[convert] {path}: {why}. Fetch it again")

    try:
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as e:
        raise FolderError(f"[convert] {path}: cannot be read: {e}") from e
    if len(mapped) < 8:
        raise fail("is shorter than a header")
    (size,) = struct.unpack("<Q", mapped[:8].tobytes())
    if not 2 <= size <= min(MAX_HEADER, len(mapped) - 8):
        raise fail(f"says that its header has {size} bytes, the file has {len(mapped)}")
    try:
        header = json.loads(mapped[8 : 8 + size].tobytes())
        entries = {str(name): each for name, each in header.items() if name != "__metadata__"}
        tables = {n: (str(e["dtype"]), tuple(map(int, e["shape"])), tuple(map(int, e["data_offsets"]))) for n, e in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise fail(f"its header is no table of tensors: {e}") from e
    found = {}
    for name, (dtype, shape, offsets) in tables.items():
        if dtype not in TYPES:
            raise FolderError(f"[convert] {path}: tensor {name} is {dtype}; expected F32, F16 or BF16. Take the unquantized model")
        begin, end = (8 + size + offset for offset in offsets)
        nbytes = prod(shape) * {"F32": 4, BYTES: 1}.get(dtype, 2)
        if end - begin != nbytes or not 0 <= begin <= end <= len(mapped):
            raise fail(f"tensor {name} of {nbytes} bytes lies at {begin} to {end}, the file has {len(mapped)} bytes")
        found[name] = Stored(name, TYPES[dtype], shape, mapped[begin:end])
    return found

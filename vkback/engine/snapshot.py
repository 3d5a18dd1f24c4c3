"""What an engine knows of a text, on the host: its tokens, the rows of the KV cache that they fill, and recurrent states, bit for bit.

A Snapshot goes to a file and comes back from it. The file is

    magic "VKBSTATE", version u32, sha256 of all that follows (32 bytes), length of the header u64, header (JSON), arrays

with the header {"tokens": [...], "settings": {...}, "arrays": [{"name", "dtype", "shape"}, ...], "extra": {...}}; arrays lie end to end in
that order. Any byte that is not as it was written fails the checksum. A file is written beside its place and moved there, so that a save
that is cut short leaves the old one whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.paths import new_file_or, unwritable

MAGIC = b"VKBSTATE"
VERSION = 1
HEAD = struct.Struct("<8sI32s")
"""Magic, version, checksum."""


class StateError(VkbackError):
    """A state file that is damaged, of another version, or of another model or setting."""


@dataclass(frozen=True)
class Snapshot:
    """tokens: those that have gone through the model, in order. arrays: of each cache its rows [n_head_kv, len(tokens), head_dim] F16, of
    each recurrent state all of it. Nobody writes to them: snapshots may share arrays."""

    tokens: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[Any]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


def write_state(path: Path, snapshot: Snapshot, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises StateError where the file cannot be written; an older file of that name is then as it was."""
    arrays = [{"name": n, "dtype": a.dtype.str, "shape": list(a.shape)} for n, a in snapshot.arrays.items()]
    header = json.dumps({"tokens": list(snapshot.tokens), "settings": dict(settings), "arrays": arrays, "extra": dict(extra)}).encode()
    contents = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in snapshot.arrays.values())
    body: list[Any] = [struct.pack("<Q", len(header)), header, *contents]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    if why := unwritable(path):
        raise StateError(f"[state] {path}: {why}")
    with new_file_or(StateError, f"[state] {path}: {snapshot.nbytes} bytes", path, durable=True) as part, part.open("wb") as file:
        file.writelines([HEAD.pack(MAGIC, VERSION, digest.digest()), *body])


def read_state(path: Path) -> tuple[Snapshot, dict[str, Any], dict[str, Any]]:
    """The snapshot, the settings and the extra values of a file. Raises StateError saying what is wrong with it."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise StateError(f"[state] {path}: cannot be read: {e.strerror}") from e
    if raw[: len(MAGIC)] != MAGIC:
        raise StateError(f"[state] {path}: is no state of vkback, which begins with {MAGIC.decode()}")
    if len(raw) < HEAD.size:
        raise StateError(f"[state] {path}: ends after {len(raw)} bytes: the file is cut short")
    _, version, checksum = HEAD.unpack_from(raw)
    if version != VERSION:
        raise StateError(f"[state] {path}: has version {version}, this vkback reads version {VERSION}: save the state anew")
    body = memoryview(raw)[HEAD.size :]
    if hashlib.sha256(body).digest() != checksum:
        raise StateError(f"[state] {path}: the checksum does not fit: the file is damaged or cut short. Save the state anew")
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(bytes(body[8 : 8 + length]))
    at = 8 + length
    arrays: dict[str, npt.NDArray[Any]] = {}
    for one in header["arrays"]:
        count = prod(one["shape"])
        arrays[one["name"]] = np.frombuffer(body, one["dtype"], count, at).reshape(one["shape"])
        at += arrays[one["name"]].nbytes
    return Snapshot(tuple(header["tokens"]), arrays), header["settings"], header["extra"]


def differences(settings: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """ "name: that of the file, here that of the engine", for each setting that differs."""
    names = list(dict.fromkeys((*settings, *own)))
    return [f"{n}: {settings.get(n)}, here {own.get(n)}" for n in names if settings.get(n) != own.get(n)]

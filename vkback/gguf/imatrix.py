"""Importance matrices: of each weight, how strong the activations are that its columns meet. llama-imatrix and
`vkback imatrix` write them.

A file is a GGUF with general.type "imatrix": of a weight NAME the F32 tensors NAME.in_sum2 [n_mat, k], sums of squared activations, and
NAME.counts [n_mat, 1], over how many tokens. n_mat is the number of experts, else 1. Its keys are imatrix.datasets, imatrix.chunk_count and
imatrix.chunk_size.

Older files (.dat), little endian: i32, the number of entries; of each i32 length and name, i32 calls, i32 number of values, and F32 values,
the mean squares times the calls; then perhaps i32 chunks, i32 length and name of the text.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.gguf.file import MAGIC, GgufError, GgufFile
from vkback.gguf.write import GgufWriter, entry
from vkback.paths import new_file_or

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
MAX_VALUES = 1 << 31

Floats = npt.NDArray[np.float32]


class ImatrixError(GgufError):
    """A file that is no importance matrix, or of another model. The text begins with its name."""

    exit_code = 2


@dataclass(frozen=True)
class Sums:
    """Of a weight. sums: F32 [n_mat, k]; counts: F32 [n_mat], tokens that each expert, or the weight, has met."""

    sums: Floats
    counts: Floats

    @property
    def importances(self) -> Floats:
        """Mean squared activations F32 [n_mat, k]; 1 for an expert that no token has met."""
        met = self.counts > 0
        counts = np.where(met, self.counts, np.float32(1))[:, None]
        found: Floats = np.where(met[:, None], self.sums / counts, np.float32(1)).astype(np.float32)
        return found

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.sums + other.sums, self.counts + other.counts)


@dataclass(frozen=True)
class Imatrix:
    """weights: sums by the name of the weight; datasets: names of texts; chunks: how many of how many tokens were read."""

    path: Path
    weights: Mapping[str, Sums]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0
    entries: int = field(default=0)
    """How many weights the file names."""

    def joined(self, other: Imatrix) -> Imatrix:
        """The sums of both. Raises ImatrixError, naming the weight, where they are of different models."""
        weights = dict(self.weights)
        for name, found in other.weights.items():
            mine = weights.get(name)
            if mine is not None and mine.sums.shape != found.sums.shape:
                raise ImatrixError(
                    f"[imatrix] {other.path}: {name} has {list(found.sums.shape)} values, expected {list(mine.sums.shape)} as {self.path}; "
                    "both must be of one model"
                )
            weights[name] = found if mine is None else mine + found
        datasets = (*self.datasets, *(d for d in other.datasets if d not in self.datasets))
        return Imatrix(self.path, weights, datasets, self.chunks + other.chunks, self.chunk_size or other.chunk_size, len(weights))


def read_imatrix(path: Path) -> Imatrix:
    """A file of either format. Raises ImatrixError, or GgufError for a broken GGUF."""
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise ImatrixError(f"[imatrix] {path}: cannot be read: {e.strerror or e}") from e
    return _of_gguf(path) if magic == MAGIC else _of_dat(path)


def _of_gguf(path: Path) -> Imatrix:
    f = GgufFile.open(path)
    names = [name.removesuffix(SUMS) for name in f.tensors if name.endswith(SUMS)]
    if not names:
        raise ImatrixError(f"[imatrix] {path}: has no tensor NAME{SUMS}, so it is no importance matrix; make one with vkback imatrix")
    weights = {}
    for name in names:
        sums, counts = f.tensor(name + SUMS), f.tensor(name + COUNTS)
        if sums.type != "F32" or counts.type != "F32" or counts.elements != sums.elements // sums.shape[-1]:
            raise ImatrixError(f"[imatrix] {path}: {name}: expected F32 sums [n_mat, k] and F32 counts, one for each of n_mat")
        values = np.array(sums.data).view(np.float32).reshape(-1, sums.shape[-1])
        weights[name] = _checked(path, name, Sums(values, np.array(counts.data).view(np.float32).reshape(-1)))
    datasets = f.metadata.get(DATASETS, ())
    given = tuple(datasets) if isinstance(datasets, list) else (datasets,) if isinstance(datasets, str) else ()
    return Imatrix(path, weights, given, f.get(CHUNKS, int, 0), f.get(CHUNK_SIZE, int, 0), len(weights))


def _of_dat(path: Path) -> Imatrix:
    data, at = path.read_bytes(), 0

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise ImatrixError(
                f"[imatrix] {path}: neither a GGUF nor an older .dat file, or cut short at byte {at}; make it anew with vkback imatrix"
            )
        at += 4
        found: int = struct.unpack_from("<i", data, at - 4)[0]
        return found

    def text() -> str:
        nonlocal at
        n = number()
        if not 0 <= n <= len(data) - at:
            raise ImatrixError(f"[imatrix] {path}: a name of {n} bytes at byte {at}, expected at most {len(data) - at}; make it anew")
        at += n
        return data[at - n : at].decode("utf-8", errors="replace")

    weights = {}
    entries = number()
    if not 1 <= entries <= len(data) // 12:
        raise ImatrixError(f"[imatrix] {path}: neither a GGUF nor an older .dat file of importances; make it with vkback imatrix")
    for _ in range(entries):
        name = text()
        calls, n = number(), number()
        if not 1 <= n <= (len(data) - at) // 4:
            raise ImatrixError(f"[imatrix] {path}: {name}: {n} values at byte {at}, the file has {len(data)} bytes. Make it anew")
        values = np.frombuffer(data, "<f4", n, at).reshape(1, n).astype(np.float32)
        at += 4 * n
        weights[name] = _checked(path, name, Sums(values, np.array([max(calls, 1)], np.float32)))
    chunks = number() if at + 4 <= len(data) else 0
    datasets = (text(),) if at + 4 <= len(data) else ()
    return Imatrix(path, weights, datasets, chunks, 0, entries)


def _checked(path: Path, name: str, found: Sums) -> Sums:
    if not (np.isfinite(found.sums).all() and np.isfinite(found.counts).all() and (found.sums >= 0).all() and (found.counts >= 0).all()):
        raise ImatrixError(f"[imatrix] {path}: {name}: a value is no number, or negative; expected sums of squares. Make it anew")
    return found


def write_imatrix(path: Path, found: Imatrix, extra: Mapping[str, Any] | None = None) -> None:
    """Write a matrix as GGUF, whole or not at all. Raises ImatrixError where the disk refuses."""
    tensors, pieces = [], []
    for name in sorted(found.weights):
        each = found.weights[name]
        tensors += [(name + SUMS, "F32", each.sums.shape), (name + COUNTS, "F32", (len(each.counts), 1))]
        pieces += [np.ascontiguousarray(part, np.float32).view(np.uint8).reshape(-1) for part in (each.sums, each.counts)]
    keys: dict[str, Any] = {
        "general.type": "imatrix",
        DATASETS: list(found.datasets),
        CHUNKS: found.chunks,
        CHUNK_SIZE: found.chunk_size,
        **(extra or {}),
    }
    entries = [entry(key, value) for key, value in keys.items()]
    with new_file_or(ImatrixError, f"[imatrix] {path}:", path) as part, GgufWriter(part, entries, tensors) as writer:
        writer.write(*pieces)

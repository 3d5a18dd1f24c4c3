"""How far one model's probabilities are from another's, token by token: what quantization, a cache type or a setting changes.

The other's log probabilities come from a base file, written while its perplexity was measured:

    magic "VKBKLBAS", version u32, length of the header u64, header (JSON), then for each scored token
    F32 largest log probability, F32 step, u16 [n_vocab]: log probability = largest - step * value

in steps of at most RANGE / 65535: below RANGE under the largest a token has less than 1e-10 of it, and all count as one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.paths import new_file, reason

MAGIC = b"VKBKLBAS"
VERSION = 1
HEAD = struct.Struct("<8sIQ")
RANGE = 24.0
"""A step is at most 3.7e-4, and rounds a log probability by half of that."""

Rows = npt.NDArray[np.floating[Any]]


class KlError(VkbackError):
    """A base file that is damaged, or of another text or vocabulary."""


class NotABase(KlError):  # noqa: N818  what it says is enough
    """A file that was named as a base and is none."""

    exit_code = 2


def log_softmax(logits: Rows) -> npt.NDArray[np.float64]:
    """Log probabilities along the last axis."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def describe_text(ids: Sequence[int], n_ctx: int, chunks: int, n_vocab: int) -> dict[str, Any]:
    """What two runs must share to be compared."""
    digest = hashlib.sha256(np.asarray(ids[: chunks * n_ctx], np.int64).tobytes()).hexdigest()
    return {"n_vocab": n_vocab, "n_ctx": n_ctx, "chunks": chunks, "text": digest}


class BaseWriter:
    """Writes a base file, which has its name when all is written. A context manager."""

    def __init__(self, path: Path, text: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """text: of `describe_text`; about: what to show of the model that made it. Raises KlError where the file cannot be written."""
        self._path, self._opened = path, ExitStack()
        header = json.dumps({**text, "about": dict(about)}).encode()
        with self._opened, _written(path):
            part = self._opened.enter_context(new_file(path))
            self._file: BinaryIO = self._opened.enter_context(part.open("wb"))
            self._file.write(HEAD.pack(MAGIC, VERSION, len(header)) + header)
            self._opened = self._opened.pop_all()

    def add(self, logits: Rows) -> None:
        """Logits of scored tokens, [n, n_vocab]. Raises KlError where they cannot be written."""
        p = log_softmax(logits)
        top = p.max(axis=-1)
        depth = np.minimum(top[:, None] - p, RANGE)
        step = np.maximum(depth.max(axis=-1), 1e-6) / 65535
        values = np.rint(depth / step[:, None].astype(np.float32)).clip(0, 65535).astype("<u2")
        heads = np.stack([top, step], axis=-1).astype("<f4")
        with _written(self._path):
            self._file.write(b"".join(head.tobytes() + row.tobytes() for head, row in zip(heads, values, strict=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _written(self._path):
            self._opened.__exit__(kind, error, trace)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Raises KlError for what the disk refuses."""
    try:
        yield
    except OSError as e:
        raise KlError(f"[kl] {path}: cannot be written: {reason(e)}") from e


class BaseReader:
    """Log probabilities of a base file, in order. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises KlError for what is no base file."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as e:
            raise NotABase(f"[kl] {path}: cannot be read: {e.strerror}") from e
        head = self._file.read(HEAD.size)
        magic, version, length = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0)
        if magic != MAGIC or version != VERSION:
            self._file.close()
            what = f"has version {version}, expected {VERSION}" if magic == MAGIC else "is no base of log probabilities"
            raise NotABase(f"[kl] {path}: {what}; write one with --save-kl-base")
        try:
            self.header: dict[str, Any] = dict(json.loads(self._file.read(length)))
        except (ValueError, TypeError, OverflowError, MemoryError) as e:
            self._file.close()
            raise KlError(f"[kl] {path}: the file is damaged or cut short: {e}; write it anew with --save-kl-base") from e

    def check(self, text: Mapping[str, Any]) -> None:
        """Raises KlError naming what differs from this run: the text, its chunks, or the vocabulary."""
        for name, value in text.items():
            if self.header.get(name) != value:
                raise KlError(
                    f"[kl] {self.path}: its {name} is {self.header.get(name)}, here {value}: the base must be of the same text, in chunks "
                    "of the same size and number, with the same vocabulary"
                )

    def rows(self, n: int) -> npt.NDArray[np.float64]:
        """The next n tokens: log probabilities [n, n_vocab]. Raises KlError where the file ends before."""
        vocab = self.header["n_vocab"]
        raw = self._file.read(n * (8 + 2 * vocab))
        if len(raw) < n * (8 + 2 * vocab):
            raise KlError(f"[kl] {self.path}: ends before the text does: the file is cut short")
        table = np.frombuffer(raw, np.uint8).reshape(n, -1)
        heads = table[:, :8].copy().view("<f4").astype(np.float64)
        # Their sum is brought back to 1: what rounding leaves of a divergence is then of second order, 1e-8.
        return log_softmax(heads[:, :1] - heads[:, 1:] * table[:, 8:].copy().view("<u2"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Divergence:
    """Of `tokens` scored tokens, base against this model.

    mean, error    Kullback-Leibler divergence, sum of p_base (log p_base - log p), in nats; one standard error of the mean
    median, p99, most
    same_top       share of tokens of which both have the same likeliest token
    log_ratio      mean of log p_base - log p of the text's own tokens: the logarithm of perplexity over that of the base; with its error
    """

    tokens: int
    mean: float
    error: float
    median: float
    p99: float
    most: float
    same_top: float
    log_ratio: float
    log_ratio_error: float


class Divergences:
    """Gathers what two runs differ by."""

    def __init__(self) -> None:
        self._kl: list[npt.NDArray[np.float64]] = []
        self._same: list[npt.NDArray[np.bool_]] = []
        self._ratio: list[npt.NDArray[np.float64]] = []

    def add(self, base: npt.NDArray[np.float64], logits: Rows, targets: npt.NDArray[Any]) -> None:
        """base: log probabilities, logits: this run's, both [n, n_vocab]; targets: the tokens that came next, [n]."""
        mine = log_softmax(logits)
        self._kl.append((np.exp(base) * (base - mine)).sum(axis=-1))
        self._same.append(base.argmax(axis=-1) == mine.argmax(axis=-1))
        rows = np.arange(len(targets))
        self._ratio.append(base[rows, targets] - mine[rows, targets])

    def result(self) -> Divergence:
        kl, ratio = np.concatenate(self._kl), np.concatenate(self._ratio)
        same = np.concatenate(self._same)
        return Divergence(
            len(kl),
            float(kl.mean()),
            _error(kl),
            float(np.median(kl)),
            float(np.percentile(kl, 99)),
            float(kl.max()),
            float(same.mean()),
            float(ratio.mean()),
            _error(ratio),
        )


def _error(values: npt.NDArray[np.float64]) -> float:
    """One standard error of the mean."""
    return float(values.std(ddof=1)) / float(np.sqrt(len(values))) if len(values) > 1 else 0.0

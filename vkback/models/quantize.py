"""Model files in other types: which tensor gets which type, as llama-quantize chooses them, and the file with the weights encoded anew.

Pieces of rows are read, encoded and written in turn, on all cores: a piece holds at most PIECE weights, so that a model of any size takes
little memory. Keys of the metadata are copied byte by byte.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.errors import VkbackError, did_you_mean
from vkback.gguf.file import GgufFile, GgufTensor, tensor_bytes
from vkback.gguf.hparams import Metadata
from vkback.gguf.imatrix import Floats, Imatrix, ImatrixError
from vkback.gguf.write import GgufWriter, data_bytes, entry
from vkback.models.architecture import ARCHITECTURES
from vkback.models.naming import file_type
from vkback.models.type_choice import BASE, NEEDS_IMPORTANCES, Counts, choose_types, file_order, fitting, is_matrix
from vkback.paths import new_file_or, unwritable

PIECE = 1 << 22
"""Weights that one process encodes at a time: 16 MiB as floats."""

FEW = 1 << 23
"""Weights that are encoded sooner than processes start."""

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
"""Other names of file types."""

NOT_IN_GGUF = {"Q2_0": 41}
"""Numbers of file types that the gguf package does not have."""

PLAIN = ("F32", "F16", "BF16")

LOWEST = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")
"""Types that are poor without importances."""

U8 = npt.NDArray[np.uint8]


class QuantizeError(VkbackError):
    """What cannot be quantized so, or a file that cannot be written."""


class QuantizeUsage(QuantizeError):  # noqa: N818  what it says is enough
    """A type or a choice that there is not."""

    exit_code = 2


@dataclass(frozen=True)
class Recipe:
    """What somebody asks for.

    type            a file type: "Q4_K_M"
    pure            every matrix in the type that the file is named for
    output, embeddings  types of the output and of the token embeddings; "": as the file type has them
    tensors         (pattern, type): matrices in whose name a regular expression is found, the first that fits
    leave_output    the output keeps its type
    requantize      sources may be quantized
    """

    type: str
    pure: bool = False
    output: str = ""
    embeddings: str = ""
    tensors: tuple[tuple[str, str], ...] = ()
    leave_output: bool = False
    requantize: bool = False


@dataclass(frozen=True)
class Step:
    """A tensor: the one that is read, and the type that is written."""

    source: GgufTensor
    type: str

    @property
    def changes(self) -> bool:
        return self.source.type != self.type

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.source.shape)


@dataclass(frozen=True)
class QuantizePlan:
    """A file to be written.

    type     the file type's whole name
    steps    tensors in the order of the new file
    notes    what somebody who asked for it should know
    """

    file: GgufFile
    type: str
    steps: tuple[Step, ...]
    imatrix: Imatrix | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """Of all tensors, without padding."""
        return sum(step.nbytes for step in self.steps)

    @property
    def elements(self) -> int:
        return sum(step.source.elements for step in self.steps)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size_bytes / self.elements


class Encoder(Protocol):
    """Encodes rows somewhere else than in this process's numpy: float32 [rows, k] to bytes, or None for a type that it leaves."""

    def __call__(self, type: str, x: Floats) -> U8 | None: ...


def file_type_called(name: str) -> str:
    """The file type of that name, in any case. Raises QuantizeUsage naming those there are."""
    asked = name.upper()
    asked = ALIASES.get(asked, asked)
    if asked not in BASE:
        raise QuantizeUsage(f"[quantize] {name}: no such type.{did_you_mean(asked, [*BASE])} There are {', '.join(BASE)}")
    return asked


def tensor_type_called(name: str, named: str) -> str:
    """The tensor type of that name, in any case. Raises QuantizeUsage naming those there are."""
    known = [type for type in quants.WEIGHT_TYPES if type != "Q8_1"]
    if name.upper() not in known:
        raise QuantizeUsage(f"[quantize] {named} {name}: no such type.{did_you_mean(name.upper(), known)} There are {', '.join(known)}")
    return name.upper()


def plan_quantize(f: GgufFile, recipe: Recipe, imatrix: Imatrix | None = None) -> QuantizePlan:
    """Which type each tensor gets. Raises QuantizeError for a source that is quantized already, QuantizeUsage for a wrong recipe,
    ImatrixError for importances of another model."""
    type = file_type_called(recipe.type)
    patterns = [(_pattern(text), tensor_type_called(kind, f"--tensor-type {text}=")) for text, kind in recipe.tensors]
    output, embeddings = (
        tensor_type_called(kind, option) if kind else ""
        for kind, option in ((recipe.output, "--output-tensor-type"), (recipe.embeddings, "--token-embedding-type"))
    )
    tensors = sorted((t for t in f.tensors.values() if not t.made), key=lambda t: file_order(t.name))
    matrices = [t for t in tensors if is_matrix(t.name, t.shape)]
    outlines = [(t.name, t.shape) for t in matrices]
    base = BASE[type]
    if recipe.pure or base in PLAIN:
        chosen = {name: fitting(base, shape[-1]) for name, shape in outlines}
    else:
        chosen = choose_types(type, outlines, _counts(f, outlines, imatrix is not None))
    notes: list[str] = []
    for t in matrices:
        asked = next((kind for pattern, kind in patterns if pattern.search(t.name)), "")
        if t.name == "token_embd.weight":
            asked = asked or embeddings
        if t.name == "output.weight" or (t.name == "token_embd.weight" and "output.weight" not in f.tensors):
            asked = asked or output
        if asked:
            chosen[t.name] = fitting(asked, t.shape[-1])
            if chosen[t.name] != asked:
                notes.append(f"{t.name} gets {chosen[t.name]}: its rows of {t.shape[-1]} are no whole blocks of {asked}")
    if recipe.leave_output:
        chosen.pop("output.weight", None)
    steps = tuple(Step(t, chosen.get(t.name, t.type)) for t in tensors)
    _check_sources(f, recipe, steps)
    if imatrix is not None:
        _check_importances(f, imatrix, steps)
    else:
        lowest = [step for step in steps if step.changes and step.type in LOWEST]
        if type in NEEDS_IMPORTANCES or lowest:
            notes.append(f"without importances {type} is poor; make them with vkback imatrix, and give --imatrix")
    return QuantizePlan(f, type, steps, imatrix, tuple(notes))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as e:
        raise QuantizeUsage(f"[quantize] --tensor-type {text}: no regular expression: {e}; expected PATTERN=TYPE, as attn_v=Q6_K") from e


def _counts(f: GgufFile, outlines: Sequence[tuple[str, tuple[int, ...]]], importances: bool) -> Counts:
    def first(key: str, default: int) -> int:
        value = f.metadata.get(f"{f.arch}.{key}", default)
        if isinstance(value, list | np.ndarray):
            value = value[0] if len(value) else default
        return int(value)

    n_layer, heads = first("block_count", 0), first("attention.head_count", 0)
    of_kv = first("attention.head_count_kv", heads)
    known = ARCHITECTURES.get(f.arch)
    is_70b = known is not None and known.size_class(Metadata(f)) == "70B"
    return Counts.of(
        outlines,
        n_layer,
        first("expert_count", 0),
        heads // of_kv if of_kv else 0,
        is_70b,
        falcon=f.arch == "falcon",
        importances=importances,
    )


def _check_sources(f: GgufFile, recipe: Recipe, steps: Sequence[Step]) -> None:
    for step in steps:
        kind = step.source.type
        if not step.changes:
            continue
        if kind not in quants.WEIGHT_TYPES:
            raise QuantizeError(f"[quantize] {f.path}: tensor {step.source.name} is {kind}, which cannot be decoded; take F32, F16 or BF16")
        if kind not in PLAIN and not recipe.requantize:
            raise QuantizeError(
                f"[quantize] {f.path}: tensor {step.source.name} is {kind} already, and rounding twice loses more. Take the original, "
                "of F32, F16 or BF16, or --allow-requantize"
            )


def _check_importances(f: GgufFile, imatrix: Imatrix, steps: Sequence[Step]) -> None:
    known = 0
    for step in steps:
        t = step.source
        found = imatrix.weights.get(t.name)
        if found is None:
            if step.changes and step.type in LOWEST and t.name not in ("token_embd.weight", "output.weight"):
                raise ImatrixError(f"[imatrix] {imatrix.path}: lacks {t.name}, which {step.type} needs; make it anew of this model")
            continue
        known += 1
        experts = prod(t.shape[:-2])
        if found.sums.size != experts * t.shape[-1] and t.name != "token_embd.weight":
            raise ImatrixError(
                f"[imatrix] {imatrix.path}: {t.name} has {found.sums.size} values, {f.path.name} needs {experts * t.shape[-1]}: "
                "it is of another model"
            )
    if not known:
        raise ImatrixError(f"[imatrix] {imatrix.path}: names no tensor of {f.path.name}: it is of another model")


def entries_of(plan: QuantizePlan) -> list[bytes]:
    """Keys and values of the new file: those of the source but for parts of a split model, and what it is now."""
    f, imatrix = plan.file, plan.imatrix
    new: dict[str, Any] = {"general.quantization_version": 2}
    known = file_type(plan.type)
    new["general.file_type"] = int(known) if known is not None else NOT_IN_GGUF[plan.type]
    if imatrix is not None:
        new["quantize.imatrix.file"] = str(imatrix.path)
        if imatrix.datasets:
            new["quantize.imatrix.dataset"] = imatrix.datasets[0]
        new["quantize.imatrix.entries_count"] = imatrix.entries
        if imatrix.chunks:
            new["quantize.imatrix.chunks_count"] = imatrix.chunks
    kept = [f.entry(key) for key in f.entries if key not in new and not key.startswith("split.")]
    return kept + [entry(key, value) for key, value in new.items()]


def quantize(
    plan: QuantizePlan,
    out: Path,
    *,
    threads: int | None = None,
    encoder: Encoder | None = None,
    on_weights: Callable[[int], object] | None = None,
) -> None:
    """Write the file. It appears under its name when it is whole.

    threads     processes that encode; None: one for each core
    encoder     asked first for tensors without importances
    on_weights  called with the number of weights of every piece once it is written
    Raises QuantizeError where the disk has no room or a weight is no number, QuantRangeError for weights that a type cannot hold.
    """
    f = plan.file
    if why := unwritable(out):
        raise QuantizeError(f"[quantize] {out}: {why}")
    size = data_bytes(((step.type, step.source.shape) for step in plan.steps), f.alignment)
    if out.parent.is_dir() and (not out.exists() or out.is_file()) and (free := shutil.disk_usage(out.parent).free) < size:
        raise QuantizeError(f"[quantize] {out}: {plan.type} takes {size / 2**30:.2f} GiB, {out.parent} has {free / 2**30:.2f} GiB free")
    tables = [(step.source.name, step.type, step.source.shape) for step in plan.steps]
    todo = sum(step.source.elements for step in plan.steps if step.changes and step.type not in PLAIN)
    count = min(threads or os.cpu_count() or 1, -(-todo // PIECE)) if todo > FEW else 1
    with (
        new_file_or(QuantizeError, f"[quantize] {out}:", out, durable=True) as part,
        _processes(count) as pool,
        GgufWriter(part, entries_of(plan), tables, f.alignment) as writer,
    ):
        ahead = 1 if pool is None else 2 * count
        for raw, weights in _in_order(_pieces(plan), ahead, lambda piece: _begun(piece, pool, encoder)):
            writer.write(raw)
            if on_weights is not None:
                on_weights(weights)


def _ignore_interrupts() -> None:
    """In a worker: who interrupts the command ends its workers through it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _processes(count: int) -> AbstractContextManager[Executor | None]:
    return nullcontext(None) if count < 2 else _pool(count)


@contextmanager
def _pool(count: int) -> Iterator[Executor]:
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_ignore_interrupts)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor: where their bytes are, what they are to be. importances: float32 [rows, k] or [k], or None."""

    name: str
    type: str
    k: int
    source: str
    raw: U8
    importances: Floats | None

    @property
    def weights(self) -> int:
        return int(self.raw.shape[0]) * self.k


def _pieces(plan: QuantizePlan) -> Iterator[Piece]:
    for step in plan.steps:
        t = step.source
        if not t.elements:
            continue
        rows, k = prod(t.shape[:-1]), t.shape[-1]
        importances = _importances(plan.imatrix, t) if step.changes else None
        step_rows = max(1, PIECE // k)
        per_expert = t.shape[-2] if len(t.shape) > 1 else rows
        for expert in range(rows // per_expert) if importances is not None else (0,):
            begin, end = (expert * per_expert, (expert + 1) * per_expert) if importances is not None else (0, rows)
            for row in range(begin, end, step_rows):
                raw = t.data[row : min(row + step_rows, end)]
                yield Piece(t.name, step.type, k, t.type, raw, None if importances is None else importances[expert])


def _importances(imatrix: Imatrix | None, t: GgufTensor) -> Floats | None:
    """[experts, k], or None where nothing is known of a tensor."""
    found = imatrix.weights.get(t.name) if imatrix is not None else None
    if found is None or found.sums.size != prod(t.shape[:-2]) * t.shape[-1]:
        return None
    return found.importances.reshape(-1, t.shape[-1])


def _begun(piece: Piece, pool: Executor | None, encoder: Encoder | None) -> Callable[[], U8]:
    """Starts a piece; what it returns waits for the bytes."""
    if piece.source == piece.type:
        return lambda: np.ascontiguousarray(piece.raw)
    if encoder is not None and piece.importances is None:
        x = decoded(piece.source, piece.raw, piece.k)
        checked_finite(piece.name, x)
        found = encoder(piece.type, x)
        if found is not None:
            return lambda: found
    if pool is None:
        return lambda: encode_rows(piece.name, piece.type, piece.source, piece.raw, piece.k, piece.importances)
    held = np.ascontiguousarray(piece.raw)
    future: Future[U8] = pool.submit(encode_rows, piece.name, piece.type, piece.source, held, piece.k, piece.importances)
    return future.result


def _in_order(pieces: Iterator[Piece], ahead: int, begin: Callable[[Piece], Callable[[], U8]]) -> Iterator[tuple[U8, int]]:
    """Bytes of pieces in their order, of which `ahead` are worked on."""
    held = [(begin(piece), piece.weights) for piece in islice(pieces, ahead)]
    while held:
        wait, weights = held.pop(0)
        yield wait(), weights
        held += [(begin(piece), piece.weights) for piece in islice(pieces, 1)]


def decoded(kind: str, raw: U8, k: int) -> Floats:
    """Rows of a file as float32 [rows, k]."""
    return quants.decode(kind, np.ascontiguousarray(raw)).reshape(-1, k)


def checked_finite(name: str, x: Floats) -> None:
    if not np.isfinite(x).all():
        raise QuantizeError(f"[quantize] {name}: a weight is NaN or infinite; expected numbers. The source is damaged, or beyond F16")


def encode_rows(name: str, type: str, source: str, raw: U8, k: int, importances: Floats | None) -> U8:
    """Rows of a file in another type. Raises QuantizeError where a weight is no number."""
    x = decoded(source, raw, k)
    checked_finite(name, x)
    if importances is None:
        return quants.encode(type, x)
    return quants.encode(type, x, importance_of(x, importances))


def importance_of(x: Floats, importances: Floats) -> Floats:
    """Importances [rows, k] of weights x whose columns have `importances` [k]: larger weights count more, as in llama-quantize's rule."""
    mean = np.mean(np.square(x), axis=1, keepdims=True)
    found: Floats = np.maximum(importances, np.float32(1e-12)) * np.sqrt(mean + np.square(x))
    return found

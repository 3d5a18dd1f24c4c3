"""Adapter files: GGUF with the A and B of low-rank adapters (LoRA), as llama.cpp reads them.

Metadata: general.type "adapter", general.architecture that of the model, adapter.type "lora", adapter.lora.alpha (0 or missing: B A is not
divided by the rank). Tensors: NAME.lora_a [rank, k] and NAME.lora_b [m, rank] for a weight NAME [m, k] of the model's file. Of
token_embd.weight llama.cpp's converter writes A as [m, rank] and B as [k, rank]: the change of the table is A B^T.

Where the embedding table is the output weight too, its adapter changes both, beside the weights as in a merged file. llama.cpp merges so;
beside the weights it can run no such adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.gguf.file import GgufError, GgufFile, GgufTensor, quoted
from vkback.gguf.fingerprint import fingerprint
from vkback.models.naming import file_type
from vkback.paths import new_file_or
from vkback.plan.passes.lora import TRANSPOSED, A, B, Lora, is_adapter_tensor

if TYPE_CHECKING:
    from vkback.models.registry import Model

Floats = npt.NDArray[np.float32]

ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
TABLE = "token_embd.weight"
TYPES = ("F32", "F16", "BF16")
"""Of A and B that stay as the file has them; others are decoded to F32."""


class AdapterError(GgufError):
    """A file that is no adapter, or none of the model that it was given for. The text begins with the adapter's name."""

    exit_code = 2


@dataclass(frozen=True)
class Given:
    """An adapter file that somebody asks for, and what its adapters are multiplied by."""

    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.path.name} times {self.scale:g}"


LoraLike = str | Path | tuple[str | Path, float] | Sequence[str | Path | tuple[str | Path, float]]
"""One adapter file or several, each alone or with its scale."""


def given(lora: LoraLike | Sequence[Given] | None, scale: float | Sequence[float] = 1.0) -> tuple[Given, ...]:
    """The adapter files that a caller asks for.

    scale  multiplies those of all, or one number for each
    Raises AdapterError for what is neither file nor (file, scale), a scale that is no number, or another count of scales than files.
    """
    if lora is None:
        return ()
    whole: Any = lora
    if not isinstance(whole, (Given, Path, Iterable)) or isinstance(whole, (bytes, Mapping)):
        raise AdapterError(f"[lora] {quoted(lora)}: expected an adapter file, (file, scale), or a list of these")
    each_scale: Any = [scale] if isinstance(scale, Real) else scale
    if not isinstance(each_scale, Iterable) or any(isinstance(s, bool) or not isinstance(s, Real) for s in each_scale):
        raise AdapterError(f"[lora] the scale is {scale!r}, expected a number, or one for each adapter (--lora-scale)")
    files: list[Any] = [whole] if isinstance(whole, (str, Path, Given)) or _is_pair(whole) else list(whole)
    scales = [scale] * len(files) if isinstance(scale, Real) else list(each_scale)
    if len(scales) != len(files):
        raise AdapterError(f"[lora] {len(scales)} scales for {len(files)} adapters; expected one for all, or one for each")
    found = []
    for each, more in zip(files, scales, strict=True):
        one = each if isinstance(each, Given) else Given(Path(each[0]), float(each[1])) if _is_pair(each) else None
        if one is None:
            if not isinstance(each, (str, Path)):
                raise AdapterError(f"[lora] {quoted(each)}: expected an adapter file, or (file, scale)")
            one = Given(Path(each))
        times = one.scale * float(more)
        if not math.isfinite(times):
            raise AdapterError(f"[lora] adapter {one.path}: times {times}, expected a number (--lora-scale)")
        found.append(Given(one.path, times))
    return tuple(found)


def _is_pair(value: Any) -> bool:
    """Whether a value is a file and its scale."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real) and isinstance(value[0], (str, Path))


def write_adapter(path: Path, arch: str, name: str, alpha: float, values: Mapping[str, Floats]) -> None:
    """Write an adapter file, whole or not at all.

    arch    general.architecture of the model
    values  A and B by name, float32
    """
    from gguf import GGUFWriter  # 29 modules, which a model without adapters does without

    with new_file_or(GgufError, f"[lora] {path}:", path) as part:
        writer = GGUFWriter(part, arch)
        writer.add_type("adapter")
        writer.add_name(name)
        writer.add_string("adapter.type", "lora")
        writer.add_float32(ALPHA, alpha)
        for tensor, value in values.items():
            writer.add_tensor(tensor, np.ascontiguousarray(value, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@dataclass(frozen=True)
class Adapter:
    """An adapter file that fits a model's file.

    pairs  A [rank, k] and B [m, rank] by the name of the weight [m, k]
    """

    path: Path
    scale: float
    alpha: float
    file: GgufFile
    pairs: Mapping[str, tuple[GgufTensor, GgufTensor]]

    @property
    def lora(self) -> Lora:
        return Lora({weight: a.shape[0] for weight, (a, _) in self.pairs.items()}, self.alpha, self.scale)

    @cached_property
    def name(self) -> str:
        """What identifies it: file name, a hash of what it holds, and its scale."""
        return f"{self.path.name} {fingerprint(self.file)[:12]} times {self.scale:g}"

    def delta(self, weight: str) -> npt.NDArray[np.float64]:
        """What it adds to a weight, float64 [m, k]; zeros where it has nothing for it."""
        a, b = map(_decoded, self.pairs[weight])
        return np.asarray(self.lora.scale(weight) * (b.astype(np.float64) @ a.astype(np.float64)))


def read_adapter(path: Path, model: GgufFile, scale: float = 1.0) -> Adapter:
    """An adapter file for a model's file, checked against it.

    scale  what the adapters are multiplied by
    Raises AdapterError naming what is wrong: no adapter, one of another architecture, one that is not always on, a tensor without its
    weight or of another shape or type.
    """

    def fail(why: str) -> AdapterError:
        return AdapterError(f"[lora] adapter {path}: {why}")

    try:
        f = GgufFile.open(path)
    except GgufError as e:
        raise fail(str(e).removeprefix(f"[gguf] {path}: ")) from e
    if f.metadata.get("general.type", "model") != "adapter" or f.metadata.get("adapter.type", "") != "lora":
        raise fail("expected an adapter file (general.type adapter, adapter.type lora). A model is for -m")
    if f.arch != model.arch:
        raise fail(f"an adapter for {quoted(f.arch)}, the model is {quoted(model.arch)}")
    if INVOCATION in f.metadata:
        raise fail(f"{INVOCATION}: it is on only behind some tokens (aLoRA), which vkback cannot do; use one that is always on")
    alpha = f.metadata.get(ALPHA, 0.0)
    if isinstance(alpha, (bool, str)) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise fail(f"{ALPHA} is {quoted(alpha)}, expected a number")
    pairs: dict[str, tuple[GgufTensor, GgufTensor]] = {}
    for name, t in f.tensors.items():
        weight = name.removesuffix(A).removesuffix(B)
        base = model.tensors.get(weight)
        if weight == name:
            raise fail(f"tensor {quoted(name)}: " + (_NORM if "norm" in name else f"expected the name of a weight with {A} or {B}"))
        if base is not None and len(base.shape) == 3:
            raise fail(f"tensor {name}: {weight} holds a matrix for each expert; adapters of experts cannot be applied")
        if base is None or not model.is_whole(weight) or len(base.shape) != 2:
            raise fail(f"tensor {name}: the model has no matrix {weight}; is the adapter for another model?")
        # A comes with B: the second of a pair has been checked with the first.
        if weight in pairs:
            continue
        a, b = (f.tensors.get(weight + which) for which in (A, B))
        if a is None or b is None:
            raise fail(f"tensor {name} stands alone; expected {weight}{A} and {weight}{B}")
        if t.type not in quants.WEIGHT_TYPES:
            raise fail(f"tensor {name} is of type {t.type}; expected one of {', '.join(quants.WEIGHT_TYPES)}")
        m, k = base.shape
        # Of a table of embeddings, rows are looked up: such files hold the pair the other way round.
        if weight == TABLE and len(a.shape) == len(b.shape) == 2 and (a.shape[0], b.shape[0]) == (m, k) and a.shape[1] == b.shape[1]:
            a, b = _held(b.name, _decoded(b).T), a
        elif len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[1], b.shape[0]) != (k, m) or a.shape[0] != b.shape[1]:
            raise fail(f"{weight}{A} {list(a.shape)} and {weight}{B} {list(b.shape)}: expected [rank, {k}] and [{m}, rank]")
        pairs[weight] = _plain(a), _plain(b)
    if not pairs:
        raise fail("the file has no tensors")
    return Adapter(path, scale, float(alpha), f, pairs)


_NORM = (
    "it replaces a norm's weights, which vkback cannot do (llama.cpp passes over it, and computes something else than was trained). Put "
    "it into the model's file, and leave it out here"
)


def _decoded(t: GgufTensor) -> Floats:
    """Its values, float32."""
    return quants.decode(t.type, np.asarray(t.data)).reshape(t.shape).astype(np.float32)


def _held(name: str, values: npt.NDArray[Any]) -> GgufTensor:
    """A tensor in memory."""
    raw = np.ascontiguousarray(values, np.float32)
    return GgufTensor(name, "F32", raw.shape, 0, raw.nbytes, raw.reshape(-1).view(np.uint8))


def _plain(t: GgufTensor) -> GgufTensor:
    """A tensor of one of TYPES."""
    return t if t.type in TYPES else _held(t.name, _decoded(t))


def _together(found: Sequence[Adapter]) -> tuple[Lora, dict[str, tuple[GgufTensor, GgufTensor]]]:
    """Adapters as one: of a weight that several have, A stacked by rows and B, times the scales, by columns. So the sum is one pair of
    products, as for one adapter. One adapter alone stays as the file has it."""
    if len(found) == 1:
        return found[0].lora, dict(found[0].pairs)
    pairs = {}
    for weight in dict.fromkeys(name for adapter in found for name in adapter.pairs):
        those = [adapter for adapter in found if weight in adapter.pairs]
        a = np.concatenate([_decoded(adapter.pairs[weight][0]) for adapter in those])
        b = np.concatenate([adapter.lora.scale(weight) * _decoded(adapter.pairs[weight][1]) for adapter in those], axis=1)
        pairs[weight] = _held(weight + A, a), _held(weight + B, b)
    return Lora({weight: a.shape[0] for weight, (a, _) in pairs.items()}, alpha=0.0), pairs


def _rows(t: GgufTensor, ranges: Sequence[tuple[int, int]]) -> GgufTensor:
    """Rows of a tensor: of each range (first, how many)."""
    if len(ranges) > 1:
        values = _decoded(t)
        return _held(t.name, np.concatenate([values[first : first + rows] for first, rows in ranges]))
    ((row0, rows),) = ranges
    nbytes = t.nbytes // t.shape[0]
    return replace(t, shape=(rows, *t.shape[1:]), offset=t.offset + row0 * nbytes, nbytes=rows * nbytes, row0=row0)


def _side_by_side(found: Sequence[Adapter]) -> tuple[Lora, dict[str, tuple[GgufTensor, GgufTensor]]]:
    """Adapters that are switched: of every weight that any has, A of all of them by rows and B by columns, zeros where one has nothing or
    less than elsewhere. So one vector of scales is that of all weights. B has alpha / rank in it."""
    widths = tuple(max(a.shape[0] for a, _ in adapter.pairs.values()) for adapter in found)
    rank = sum(widths)
    pairs = {}
    for weight in dict.fromkeys(name for adapter in found for name in adapter.pairs):
        k, m = next((a.shape[1], b.shape[0]) for a, b in (adapter.pairs[weight] for adapter in found if weight in adapter.pairs))
        whole_a, whole_b = np.zeros((rank, k), np.float32), np.zeros((m, rank), np.float32)
        first = 0
        for adapter, width in zip(found, widths, strict=True):
            if weight in adapter.pairs:
                a, b = map(_decoded, adapter.pairs[weight])
                whole_a[first : first + len(a)] = a
                whole_b[:, first : first + len(a)] = replace(adapter, scale=1.0).lora.scale(weight) * b
            first += width
        pairs[weight] = _held(weight + A, whole_a), _held(weight + B, whole_b)
    return Lora(dict.fromkeys(pairs, rank), alpha=0.0, widths=widths), pairs


def without_adapters(model: Model) -> Model:
    """The model by itself."""
    tensors = {name: t for name, t in model.file.tensors.items() if not is_adapter_tensor(name)}
    return replace(model, file=replace(model.file, tensors=tensors), lora=None, adapters=())


def with_adapters(model: Model, files: Sequence[Given], *, switched: bool = False) -> Model:
    """A model with adapter files beside its weights; what several add to a weight is added up. switched: their scales are an input of its
    graphs (vkback/plan/passes/lora.py). Raises AdapterError."""
    base = GgufFile.open(model.file.path)
    found = [read_adapter(each.path, base, each.scale) for each in files]
    lora, pairs = _side_by_side(found) if switched else _together(found)
    parts: dict[str, list[str]] = {}
    for name, t in model.file.tensors.items():  # a tensor of several weights (Q, K and V of gpt2): each has the same A, and its rows of B
        parts.setdefault(t.name, []).append(name)
    # ... and so has each weight that parts of a tensor make, whose rows of B are theirs.
    made_of = {part: weight for weight, sources in model.file.joined.items() for part in sources}
    ranks = {made_of.get(part, part): rank for whole, rank in lora.ranks.items() for part in parts[whole]}
    lora = replace(lora, ranks=ranks)
    nodes = model.graph(1, 1, head="all").nodes
    tables = {node.inputs[0].name for node in nodes if node.op == "GET_ROWS"}
    used = tables | {node.inputs[0].name for node in nodes if node.op == "MUL_MAT"}
    tensors: dict[str, GgufTensor] = {}
    for whole, (a, b) in pairs.items():
        for part in dict.fromkeys(made_of.get(part, part) for part in parts[whole]):
            if part not in used:
                path = next(each.path for each in found if whole in each.pairs)
                raise AdapterError(f"[lora] adapter {path}: {whole} does not multiply activations, so nothing can run beside it; merge it")
            cut = [model.file.tensor(source) for source in model.file.joined.get(part, (part,))]
            tensors |= {f"{part}{A}": a, f"{part}{B}": _rows(b, [(t.row0, t.shape[0]) for t in cut])}
            if part in tables:
                tensors[f"{part}{TRANSPOSED}"] = _held(f"{part}{TRANSPOSED}", _decoded(a).T)
    return replace(model, file=replace(model.file, tensors={**model.file.tensors, **tensors}), lora=lora, adapters=tuple(found))


@dataclass(frozen=True)
class Merged:
    """A weight after `merge`.

    nmse  of what was stored of the sum
    loss  length of what rounding to its type changed, over the length of what the adapter changed
    """

    name: str
    nmse: float
    loss: float


def merge(model: Path, files: Sequence[Given], out: Path, type: str | None = None) -> list[Merged]:
    """Write a model's file with adapters added to its weights.

    type  of the changed weights, as F16 or Q8_0; None: those that they have, which lose much of a small adapter where they are quantized
    ->  the changed weights
    Raises GgufError, and QuantRangeError for a sum that the type cannot hold.
    """
    base = GgufFile.open(model)
    adapters = [read_adapter(each.path, base, each.scale) for each in files]
    names = list(dict.fromkeys(weight for adapter in adapters for weight in adapter.pairs))
    found: list[Merged] = []

    def summed(weight: str) -> npt.NDArray[np.uint8]:
        """The bytes of a sum."""
        t = base.tensor(weight)
        change = np.sum([adapter.delta(weight) for adapter in adapters if weight in adapter.pairs], axis=0)
        wanted = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape) + change
        raw = quants.encode_weights(type or t.type, wanted.astype(np.float32), weight)
        error = float(np.sum((quants.decode(type or t.type, raw).reshape(t.shape) - wanted) ** 2))
        found.append(Merged(weight, error / float(np.sum(wanted**2)), math.sqrt(error / (float(np.sum(change**2)) or 1.0))))
        return np.ascontiguousarray(raw)

    with new_file_or(GgufError, f"[lora] {out}:", out) as part:
        if type is None and len(base.files) == 1:
            with model.open("rb") as source, part.open("wb") as target:
                while block := source.read(1 << 24):
                    target.write(block)
            with part.open("r+b") as copy:
                for weight in names:
                    copy.seek(base.tensor(weight).offset)
                    copy.write(summed(weight).data)
        else:
            _write_anew(base, part, {weight: type or base.tensor(weight).type for weight in names}, type, summed)
    return found


def _write_anew(
    f: GgufFile, out: Path, types: Mapping[str, str], type: str | None, changed: Callable[[str], npt.NDArray[np.uint8]]
) -> None:
    """Write a model as one file, the tensors of `types` in those types with the bytes that `changed` gives; type: that of the file."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    writer = GGUFWriter(out, f.arch)
    for key, field in GGUFReader(f.path).fields.items():
        value = file_type(type) if key == "general.file_type" and type else None
        if not key.startswith(("GGUF.", "split.")) and key != "general.architecture":
            writer.add_key_value(key, field.contents() if value is None else value, field.types[0], (*field.types, None)[1])
    for name, t in f.tensors.items():
        kind = types.get(name, t.type)
        width = quants.row_bytes(kind, t.shape[-1])
        rows = t.elements // t.shape[-1]
        writer.add_tensor_info(name, (*t.shape[:-1], width), np.dtype(np.uint8), rows * width, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, t in f.tensors.items():
        writer.write_tensor_data(changed(name) if name in types else np.asarray(t.data))
    writer.close()


__all__ = [
    "Adapter",
    "AdapterError",
    "Given",
    "LoraLike",
    "Merged",
    "given",
    "merge",
    "read_adapter",
    "with_adapters",
    "without_adapters",
    "write_adapter",
]

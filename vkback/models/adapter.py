"""Adapter files: GGUF with the A and B of low-rank adapters (LoRA), as llama.cpp reads them.

Metadata: general.type "adapter", general.architecture that of the model, adapter.type "lora", adapter.lora.alpha. Tensors: NAME.lora_a
[rank, k] and NAME.lora_b [m, rank] for a weight NAME [m, k] of the model's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.models.gguf_file import GgufError, GgufFile, quoted
from vkback.models.naming import file_type
from vkback.paths import new_file_or
from vkback.plan.lora import A, B, Lora

if TYPE_CHECKING:
    from vkback.models.registry import Model

Floats = npt.NDArray[np.float32]

ALPHA = "adapter.lora.alpha"
TYPES = ("F32", "F16", "BF16")
"""Of A and B."""


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


def read_adapter(path: Path, model: GgufFile, strength: float = 1.0) -> tuple[Lora, GgufFile]:
    """An adapter file for a model's file, checked against it.

    strength  what the adapters are multiplied by
    Raises GgufError naming what is wrong: a strength that is no number, no adapter, one of another architecture, a tensor without its
    weight or of another shape or type.
    """
    if not math.isfinite(strength):
        raise GgufError(f"[lora] {path}: adapters times {strength}, expected a number (--lora-scale)")
    f = GgufFile.open(path)
    if f.get("general.type", str, "model") != "adapter" or f.get("adapter.type", str, "") != "lora":
        why = "expected an adapter file (general.type adapter, adapter.type lora). A model is for -m"
        raise GgufError(f"[lora] {path}: {why}")
    if f.arch != model.arch:
        raise GgufError(f"[lora] {path}: an adapter for {quoted(f.arch)}, the model is {quoted(model.arch)}")
    ranks: dict[str, int] = {}
    for name, t in f.tensors.items():
        weight = name.removesuffix(A).removesuffix(B)
        base = model.tensors.get(weight)
        if weight == name or base is None or not model.is_whole(weight) or len(base.shape) != 2:
            raise GgufError(f"[lora] {path}: tensor {name}: the model has no matrix {weight}; is the adapter for another model?")
        pair = [f.tensors.get(weight + which) for which in (A, B)]
        if pair[0] is None or pair[1] is None:
            raise GgufError(f"[lora] {path}: tensor {name} stands alone; expected {weight}{A} and {weight}{B}")
        (rank, k), (m, rank_b) = pair[0].shape, pair[1].shape
        if (m, k) != base.shape or rank != rank_b or t.type not in TYPES:
            raise GgufError(
                f"[lora] {path}: {weight}{A} {list(pair[0].shape)} and {weight}{B} {list(pair[1].shape)} of {t.type}: expected "
                f"[rank, {base.shape[1]}] and [{base.shape[0]}, rank] of {', '.join(TYPES)}"
            )
        ranks[weight] = rank
    if not ranks:
        raise GgufError(f"[lora] {path}: the file has no tensors")
    return Lora(ranks, f.get(ALPHA, float), strength), f


def _cut(lora: Lora, f: GgufFile, model: GgufFile) -> tuple[Lora, GgufFile]:
    """Adapters of tensors that hold several weights (Q, K and V of gpt2), by weight: each has the same A, and its rows of B."""
    parts: dict[str, dict[str, int]] = {}
    for name, t in sorted(model.tensors.items(), key=lambda item: item[1].row0):
        parts.setdefault(t.name, {})[name] = t.shape[0]
    f = f.cut({f"{whole}{B}": {f"{part}{B}": rows for part, rows in parts[whole].items()} for whole in lora.ranks})
    first = {f"{part}{A}": f.tensor(f"{whole}{A}") for whole in lora.ranks for part in parts[whole]}
    second = {name: t for name, t in f.tensors.items() if name.endswith(B)}
    ranks = {part: rank for whole, rank in lora.ranks.items() for part in parts[whole]}
    return replace(lora, ranks=ranks), replace(f, tensors={**first, **second})


def with_adapter(model: Model, path: Path, strength: float = 1.0) -> Model:
    """A model with an adapter file beside its weights. Raises GgufError."""
    lora, f = _cut(*read_adapter(path, GgufFile.open(model.file.path), strength), model.file)
    products = {node.inputs[0].name for node in model.graph(1, 1, head="all").nodes if node.op == "MUL_MAT"}
    if others := sorted(set(lora.ranks) - products):
        raise GgufError(f"[lora] {path}: {others[0]} does not multiply activations; adapters of embedding tables cannot be run, but merged")
    return replace(model, file=replace(model.file, tensors={**model.file.tensors, **f.tensors}), lora=lora)


def delta(f: GgufFile, weight: str) -> npt.NDArray[np.float64]:
    """B A of a weight, float64 [m, k], without the scale."""
    pair = f.tensor(weight + A), f.tensor(weight + B)
    a, b = (quants.decode(t.type, np.asarray(t.data)).reshape(t.shape).astype(np.float64) for t in pair)
    return np.asarray(b @ a)


@dataclass(frozen=True)
class Merged:
    """A weight after `merge`.

    nmse  of what was stored of the sum
    loss  length of what rounding to its type changed, over the length of what the adapter changed
    """

    name: str
    nmse: float
    loss: float


def merge(model: Path, adapter: Path, out: Path, strength: float = 1.0, type: str | None = None) -> list[Merged]:
    """Write a model's file with an adapter added to its weights.

    type  of the changed weights, as F16 or Q8_0; None: those that they have, which lose much of a small adapter where they are quantized
    ->  the changed weights
    Raises GgufError, and QuantRangeError for a sum that the type cannot hold.
    """
    base = GgufFile.open(model)
    lora, f = read_adapter(adapter, base, strength)
    found: list[Merged] = []

    def summed(weight: str) -> npt.NDArray[np.uint8]:
        """The bytes of a sum."""
        t = base.tensor(weight)
        change = lora.scale(weight) * delta(f, weight)
        wanted = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape) + change
        raw = quants.encode_weights(type or t.type, wanted.astype(np.float32), weight)
        error = float(np.sum((quants.decode(type or t.type, raw).reshape(t.shape) - wanted) ** 2))
        found.append(Merged(weight, error / float(np.sum(wanted**2)), math.sqrt(error / (float(np.sum(change**2)) or 1.0))))
        return np.ascontiguousarray(raw)

    with new_file_or(GgufError, f"[lora] {out}:", out) as part:
        if type is None:
            with model.open("rb") as source, part.open("wb") as target:
                while block := source.read(1 << 24):
                    target.write(block)
            with part.open("r+b") as copy:
                for weight in lora.ranks:
                    copy.seek(base.tensor(weight).offset)
                    copy.write(summed(weight).data)
        else:
            _write_anew(base, part, lora.ranks, type, summed)
    return found


def _write_anew(f: GgufFile, out: Path, names: Collection[str], type: str, changed: Callable[[str], npt.NDArray[np.uint8]]) -> None:
    """Write a file with some of its tensors in another type, whose bytes `changed` gives, one at a time."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    writer = GGUFWriter(out, f.arch)
    for key, field in GGUFReader(f.path).fields.items():
        value = file_type(type) if key == "general.file_type" else None
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents() if value is None else value, field.types[0], (*field.types, None)[1])
    for name, t in f.tensors.items():
        kind = type if name in names else t.type
        width = quants.row_bytes(kind, t.shape[-1])
        rows = t.elements // t.shape[-1]
        writer.add_tensor_info(name, (*t.shape[:-1], width), np.dtype(np.uint8), rows * width, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, t in f.tensors.items():
        writer.write_tensor_data(changed(name) if name in names else np.asarray(t.data))
    writer.close()


__all__ = ["Merged", "merge", "read_adapter", "with_adapter", "write_adapter"]

"""Adapter files: GGUF with the A and B of low-rank adapters (LoRA), as llama.cpp reads them.

Metadata: general.type "adapter", general.architecture that of the model, adapter.type "lora", adapter.lora.alpha. Tensors: NAME.lora_a
[rank, k] and NAME.lora_b [m, rank] for a weight NAME [m, k] of the model's file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from vkback import quants
from vkback.models.gguf_file import GgufError, GgufFile, quoted
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
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
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
        part.replace(path)
    except OSError as e:
        raise GgufError(f"[lora] {path}: cannot be written: {e.strerror or e}") from e
    finally:
        part.unlink(missing_ok=True)


def read_adapter(path: Path, model: GgufFile, strength: float = 1.0) -> tuple[Lora, GgufFile]:
    """An adapter file for a model's file, checked against it.

    strength  what the adapters are multiplied by
    Raises GgufError naming what is wrong: no adapter, of another architecture, a tensor without its weight, of another shape or type.
    """
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
        if weight == name or base is None or base.name != weight or len(base.shape) != 2:
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


def with_adapter(model: Model, path: Path, strength: float = 1.0) -> Model:
    """A model with an adapter file beside its weights. Raises GgufError."""
    lora, f = read_adapter(path, model.file, strength)
    products = {node.inputs[0].name for node in model.graph(1, 1, head="all").nodes if node.op == "MUL_MAT"}
    if others := sorted(set(lora.ranks) - products):
        raise GgufError(f"[lora] {path}: {others[0]} does not multiply activations; adapters of embedding tables cannot be run, but merged")
    return replace(model, file=replace(model.file, tensors={**model.file.tensors, **f.tensors}), lora=lora)


def delta(f: GgufFile, weight: str) -> npt.NDArray[np.float64]:
    """B A of a weight, float64 [m, k], without the scale."""
    pair = f.tensor(weight + A), f.tensor(weight + B)
    a, b = (quants.decode(t.type, np.asarray(t.data)).reshape(t.shape).astype(np.float64) for t in pair)
    return np.asarray(b @ a)


def merge(model: Path, adapter: Path, out: Path, strength: float = 1.0) -> list[tuple[str, float]]:
    """Write a model's file with an adapter added to its weights, which keep their types.

    ->  of each changed weight its name, and the NMSE of what was stored of the sum: what its type rounds away
    Raises GgufError.
    """
    base = GgufFile.open(model)
    lora, f = read_adapter(adapter, base, strength)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    found: list[tuple[str, float]] = []
    try:
        with model.open("rb") as source, part.open("wb") as target:
            while block := source.read(1 << 24):
                target.write(block)
        with part.open("r+b") as target:
            for weight in lora.ranks:
                t = base.tensor(weight)
                wanted = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape) + lora.scale(weight) * delta(f, weight)
                raw = quants.encode(t.type, wanted.astype(np.float32))
                error = quants.decode(t.type, raw).reshape(t.shape) - wanted
                found.append((weight, float(np.sum(error * error) / np.sum(wanted * wanted))))
                target.seek(t.offset)
                target.write(np.ascontiguousarray(raw).data)
        part.replace(out)
    except OSError as e:
        raise GgufError(f"[lora] {out}: cannot be written: {e.strerror or e}") from e
    finally:
        part.unlink(missing_ok=True)
    return found


__all__ = ["merge", "read_adapter", "with_adapter", "write_adapter"]

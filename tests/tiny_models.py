"""Tiny models of an architecture, and files that differ from them in a key or a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.gguf.file import GgufTensor
from vkback.models import GgufFile
from vkback.models.architecture import ARCHITECTURES
from vkback.models.synth import SHAPES, synthesize

ALL_TINY = [name for name in SHAPES if name.startswith("tiny-")]
TINY = [name for name in ALL_TINY if ARCHITECTURES[SHAPES[name].arch].causal]
"""Shapes of models that make text."""
ENCODERS = [name for name in ALL_TINY if name not in TINY]
"""Shapes of models that make vectors of texts alone."""


def tiny(arch: str, folder: Path) -> Path:
    """The model that tests/references compares, in Q8_0."""
    path = folder / f"{arch}.gguf"
    synthesize(f"tiny-{arch}-Q8_0", path)
    return path


def tiny_with_text(path: Path) -> Path:
    """A llama of two layers with a vocabulary of 32 letters: the smallest model that makes text."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "C", "."]
    types = [2, 3, 3, *[1] * (len(tokens) - 3)]
    vocabulary: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": [-1.0] * len(tokens), "token_type": types}
    vocabulary |= {"bos_token_id": 1, "eos_token_id": 2}
    return write_gguf(path, "llama", llama_metadata() | {f"tokenizer.ggml.{key}": v for key, v in vocabulary.items()}, llama_tensors())


def with_mtp_block(path: Path, *, like: int, **made: np.ndarray) -> Path:
    """A copy beside the file with one more block, which predicts the token after the next one: weights of block `like`, and random ones of
    its own, or `made` ones by name (eh_proj)."""
    f = GgufFile.open(path)
    n_layer, n_embd = int(f.metadata[f"{f.arch}.block_count"]), int(f.metadata[f"{f.arch}.embedding_length"])
    rng = np.random.default_rng(5)
    own = {"eh_proj": (rng.standard_normal((n_embd, 2 * n_embd)) / np.sqrt(2 * n_embd)).astype(np.float32)}
    own |= {name: rng.uniform(0.5, 1.5, n_embd).astype(np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    extra = {f"blk.{n_layer}.nextn.{name}.weight": ("F32", values) for name, values in (own | made).items()}
    copied = {n.replace(f"blk.{like}.", f"blk.{n_layer}."): t for n, t in f.tensors.items() if n.startswith(f"blk.{like}.")}
    return changed(path, metadata={"block_count": n_layer + 1, "nextn_predict_layers": 1}, extra=extra, copied=copied)


def changed(
    path: Path,
    *,
    without: Collection[str] = (),
    metadata: Mapping[str, Any] | None = None,
    cut: str = "",
    extra: Mapping[str, tuple[str, np.ndarray]] | None = None,
    copied: Mapping[str, GgufTensor] | None = None,
) -> Path:
    """A copy beside the file, with other metadata under the architecture's prefix (None removes a key), without some tensors, or with one
    that has a row less; extra: tensors beside its own, copied: the same, by other names."""
    f = GgufFile.open(path)
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in f.metadata.items()}
    keys |= {f"{f.arch}.{key}": value for key, value in (metadata or {}).items()}
    keys = {key: value for key, value in keys.items() if value is not None and key != "general.architecture"}
    tensors = {}
    for name, t in {**f.tensors, **(copied or {})}.items():
        rows = np.ascontiguousarray(t.data).reshape(t.shape[0], -1)[: t.shape[0] - (name == cut)]
        array = rows.view(np.float32) if t.type == "F32" else rows
        if name not in without:
            tensors[name] = (t.type, array.reshape(-1) if len(t.shape) == 1 else array.reshape(len(array), *t.shape[1:-1], -1))
    tensors |= extra or {}
    return write_gguf(path.with_name(f"{len(list(path.parent.iterdir()))}.gguf"), f.arch, keys, tensors)

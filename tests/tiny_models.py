"""Tiny models of an architecture, and files that differ from them in a key or a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from make_gguf import llama_metadata, llama_tensors, write_gguf

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


def changed(path: Path, *, without: Collection[str] = (), metadata: Mapping[str, Any] | None = None, cut: str = "") -> Path:
    """A copy beside the file, with other metadata under the architecture's prefix (None removes a key), without some tensors, or with one
    that has a row less."""
    f = GgufFile.open(path)
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in f.metadata.items()}
    keys |= {f"{f.arch}.{key}": value for key, value in (metadata or {}).items()}
    keys = {key: value for key, value in keys.items() if value is not None and key != "general.architecture"}
    tensors = {}
    for name, t in f.tensors.items():
        rows = np.ascontiguousarray(t.data).reshape(t.shape[0], -1)[: t.shape[0] - (name == cut)]
        array = rows.view(np.float32) if t.type == "F32" else rows
        if name not in without:
            tensors[name] = (t.type, array.reshape(-1) if len(t.shape) == 1 else array.reshape(len(array), *t.shape[1:-1], -1))
    return write_gguf(path.with_name(f"{len(list(path.parent.iterdir()))}.gguf"), f.arch, keys, tensors)

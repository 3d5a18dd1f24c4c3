"""Tiny models of an architecture, and files that differ from them in a key or a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.gguf.file import GgufTensor
from vkback.models import GgufFile
from vkback.models.architecture import ARCHITECTURES
from vkback.models.keys import SECTIONS
from vkback.models.shape import ModelShape
from vkback.models.synth import SHAPES, synthesize

ALL_TINY = [name for name in SHAPES if name.startswith("tiny-")]
TINY = [name for name in ALL_TINY if ARCHITECTURES[SHAPES[name].arch].causal]
"""Shapes of models that make text."""
ENCODERS = [name for name in ALL_TINY if name not in TINY]
"""Shapes of models that make vectors of texts alone."""


OF_A_KIND = frozenset(
    f"tiny-{name}"
    for name in (
        "llama",
        "gpt-oss",
        "gemma3",
        "gemma4-ple",
        "deepseek2",
        "qwen3moe",
        "lfm2",
        "mamba2",
        "falcon-h1",
        "qwen35moe",
        "phi3-long",
    )
)
"""What models are built from, each at least once: attention with windows, sinks, a latent, layers that read others' rows, factors of RoPE;
experts; recurrent states of each kind. test_references runs every model. What tests cross with all models, `make test` does with these."""


def of_a_kind(names: Sequence[str], few: Collection[str] = OF_A_KIND) -> list[Any]:
    """Values of `parametrize`: those among the few, and the others marked `exhaustive`."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


UNIT = 32
"""Values that share a scale in a quantized cache: heads there are whole units."""


def in_whole_units(s: ModelShape) -> ModelShape:
    """The shape with heads of as many whole units as hold what it has; RoPE turns more where it turns whole heads, or keys behind a
    latent."""

    def up(n: int) -> int:
        return -(-n // UNIT) * UNIT

    m, width = dict(s.metadata), up(s.head_dim)
    if "attention.kv_lora_rank" in m:
        more = up(m["attention.key_length"]) - m["attention.key_length"]
        for key in ("attention.key_length", "attention.key_length_mla", "rope.dimension_count"):
            m |= {key: m[key] + more} if key in m else {}
        return replace(s, metadata=m)
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        m |= {key: up(m[key])} if key in m else {}
    if SECTIONS in m and not s.rope_dims:
        first, *rest = m[SECTIONS]
        m[SECTIONS] = (first + (width - s.head_dim) // 2, *rest)
    # A layer of deci with a matrix in the place of attention has heads as wide as the stream.
    n_embd = s.n_head * width if any(layer.n_head and not layer.n_head_kv for layer in s.layers) else s.n_embd
    return replace(s, n_embd=n_embd, head_dim=width, metadata=m)


def tiny_in_whole_units(name: str, path: Path) -> Path:
    """A tiny model of that shape."""
    with patch.dict(SHAPES, {f"{name}-units": in_whole_units(SHAPES[name])}):
        synthesize(f"{name}-units-Q8_0", path)
    return path


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

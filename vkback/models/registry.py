"""The architectures there are, and a model opened and checked as one of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from vkback import quants
from vkback.graph import Graph
from vkback.models import gpt_oss, llama, qwen3moe
from vkback.models.builder import Head
from vkback.models.gguf_file import GgufError, GgufFile
from vkback.models.hparams import NO_TEXT_VOCABULARY, HParams, RopeMode
from vkback.models.naming import model_description
from vkback.models.tokenizer import Tokenizer


class BuildGraph(Protocol):
    def __call__(self, hp: HParams, n_tokens: int, n_ctx: int, *, head: Head) -> Graph: ...


@dataclass(frozen=True)
class Architecture:
    """What sets an architecture apart: how it pairs values in RoPE, and its graph."""

    name: str
    rope_mode: RopeMode
    build_graph: BuildGraph


ARCHITECTURES: dict[str, Architecture] = {
    "gpt-oss": Architecture("gpt-oss", gpt_oss.ROPE_MODE, gpt_oss.build_graph),
    "llama": Architecture("llama", llama.ROPE_MODE, llama.build_graph),
    "qwen3moe": Architecture("qwen3moe", qwen3moe.ROPE_MODE, qwen3moe.build_graph),
}
"""Every architecture by its `general.architecture`."""


def architecture(f: GgufFile) -> Architecture:
    """The architecture of a file. Raises GgufError listing those there are."""
    found = ARCHITECTURES.get(f.arch)
    if found is None:
        raise GgufError(f"[gguf] {f.path}: architecture {f.arch!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    return found


def read_hparams(f: GgufFile) -> HParams:
    """Hyperparameters of a file of any supported architecture. Raises GgufError."""
    return HParams.from_gguf(f, rope_mode=architecture(f).rope_mode)


def build_graph(hp: HParams, n_tokens: int, n_ctx: int, *, head: Head) -> Graph:
    """The graph of `hp`'s architecture; see vkback/models/builder.py for inputs and names."""
    return ARCHITECTURES[hp.arch].build_graph(hp, n_tokens, n_ctx, head=head)


DEFAULT_N_CTX = 4096
"""Enough for a conversation; a model trained on 131072 would fill a GPU with its cache alone."""


@dataclass(frozen=True)
class Model:
    """A file whose hyperparameters and tensors have been checked against its architecture."""

    file: GgufFile
    hp: HParams

    @classmethod
    def open(cls, path: str | Path) -> Model:
        """Raises GgufError when the file is broken, of an unknown architecture, lacks a tensor, or has one that would go unused or is of a
        type without codec and kernel."""
        f = GgufFile.open(path)
        model = cls(f, read_hparams(f))
        used = model.graph(1, 1, head="all").tensors()
        for name, tensor in f.tensors.items():
            if name not in used:
                raise GgufError(f"[gguf] {f.path}: tensor {name} has no place in the {f.arch} architecture; the result would be wrong")
            if tensor.type not in quants.WEIGHT_TYPES:
                raise GgufError(
                    f"[gguf] {f.path}: tensor {name} has type {tensor.type}, which has no kernel; "
                    f"types with one are {', '.join(quants.WEIGHT_TYPES)}"
                )
        return model

    def graph(self, n_tokens: int, n_ctx: int, *, head: Head) -> Graph:
        return build_graph(self.hp, n_tokens, n_ctx, head=head)

    @property
    def default_n_ctx(self) -> int:
        """Rows of the KV cache unless somebody asks for others: the trained context, at most DEFAULT_N_CTX."""
        return min(self.hp.n_ctx_train, DEFAULT_N_CTX)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError when the file has no text vocabulary."""
        return Tokenizer.from_gguf(self.file)

    @property
    def has_text(self) -> bool:
        """Whether the file has a text vocabulary; synthetic models know token ids only."""
        return bool(self.file.metadata.get("tokenizer.ggml.model", NO_TEXT_VOCABULARY) != NO_TEXT_VOCABULARY)

    @property
    def description(self) -> str:
        """As llama-bench prints it: `llama 8B Q4_K - Medium`."""
        return model_description(self.file)

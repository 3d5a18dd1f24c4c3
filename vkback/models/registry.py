"""A model: a file opened and checked as one of the architectures there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import vkback.models.architectures  # registers them  # noqa: F401
from vkback import quants
from vkback.gguf.file import GgufError, GgufFile, quoted
from vkback.gguf.hparams import NO_TEXT_VOCABULARY, HParams
from vkback.gguf.tokenizer import Tokenizer
from vkback.graph import Graph
from vkback.models.adapter import Adapter
from vkback.models.architecture import ARCHITECTURES, Architecture
from vkback.models.builder import F16_CACHE, TWO_SLOTS, CacheTypes, Head, Paging, StateSlots
from vkback.models.naming import model_description, model_heading
from vkback.models.texts import DENSE, DISTANCES, SPANS, Pooling, Texts, distances, pool_weights, ranks, spans, window_of
from vkback.models.unsupported import refusal
from vkback.ops.storage import nbytes
from vkback.plan.passes.lora import Lora, adapted


def architecture(f: GgufFile) -> Architecture:
    """The architecture of a file, its hyperparameters read. Raises GgufError, which for an architecture that is not supported says what it
    lacks and lists those that are."""
    found = ARCHITECTURES.get(f.arch)
    if found is None:
        raise GgufError(f"[gguf] {f.path}: {refusal(f.arch, quoted(f.arch), ARCHITECTURES)}")
    return found(found.opened(f))


def read_hparams(f: GgufFile) -> HParams:
    """Hyperparameters of a file of any supported architecture. Raises GgufError."""
    return architecture(f).hp


def _check_biases(known: Architecture) -> None:
    """Raises GgufError naming a bias that a layer lacks: one that its architecture always has, or one that another layer has, all of whose
    other tensors are those of this one."""

    def kind(names: set[str]) -> frozenset[str]:
        return frozenset(name for name in names if not name.endswith(".bias"))

    layers: dict[str, set[str]] = {}
    for name in known.file.tensors:
        if name.startswith("blk.") and name not in known.unused_tensors:
            _, layer, rest = name.split(".", 2)
            layers.setdefault(layer, set()).add(rest)
    biases: dict[frozenset[str], set[str]] = {}
    for names in layers.values():
        always = {f"{stem}.bias" for stem in known.biases if f"{stem}.weight" in names}
        biases.setdefault(kind(names), always).update(names - kind(names))
    for layer, names in layers.items():
        for lacking in sorted(biases[kind(names)] - names):
            raise known.hp.missing(f"blk.{layer}.{lacking}")


def text_inputs(
    known: Architecture,
    graph: Graph,
    texts: Sequence[Sequence[int]],
    n: int,
    pooling: Pooling,
    segments: Sequence[Sequence[int]] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """What goes into a graph of n tokens for these texts, by name; what they have fewer is padding. segments: of each token, default 0."""
    lengths = [len(text) for text in texts]
    used = sum(lengths)

    def filled(values: Iterable[int], rest: int) -> npt.NDArray[np.int32]:
        out = np.full(n, rest, np.int32)
        out[:used] = np.fromiter(values, np.int32, used)
        return out

    given: dict[str, npt.NDArray[Any]] = {}
    for t in graph.tensors().values():
        if t.kind != "input":
            continue
        if t.name == "pool":
            kind = known.rank_pooling if pooling == "rank" else pooling
            given[t.name] = pool_weights(lengths, n, t.shape[1], kind)
        elif t.name == DISTANCES:
            given[t.name] = distances(lengths, n)
        elif t.name.startswith(SPANS):
            window, chunked = window_of(t.name)
            given[t.name] = spans(lengths, n, window=window, causal=known.causal, chunked=chunked)
        elif t.name == "tokens":
            given[t.name] = filled(chain.from_iterable(texts), 0)
        elif t.name == "pos":
            given[t.name] = filled((i for length in lengths for i in range(length)), -1)
        elif t.name == "rows":
            given[t.name] = filled(range(used), -1)
        elif t.name == "segments":
            kinds = known.hp.weights["token_types.weight"].shape[0]
            given[t.name] = np.minimum(filled(chain.from_iterable(segments) if segments else repeat(0, used), 0), kinds - 1)
    return given


DEFAULT_N_CTX = 4096
"""Enough for a conversation; a model trained on 131072 would fill a GPU with its cache alone."""


@dataclass(frozen=True)
class Model:
    """A file whose hyperparameters and tensors have been checked against its architecture.

    lora      adapters beside its weights (vkback/models/adapter.py); `file` has their tensors, too
    adapters  the files that they are of
    """

    file: GgufFile
    architecture: Architecture
    lora: Lora | None = None
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Model:
        """Raises GgufError when the file is broken, of an unknown architecture, lacks a tensor, or has one that would go unused or is of a
        type without codec and kernel."""
        return cls.of(GgufFile.open(path))

    @classmethod
    def of(cls, file: GgufFile) -> Model:
        """The model of an open file. Raises GgufError as `open` does."""
        known = architecture(file)
        f = known.file
        model = cls(f, known)
        tensors = [t for graph in model.whole_graphs() for t in graph.tensors().values()]
        used = {source for t in tensors for source in (t.name, *(t.recipe.sources if t.recipe else ()))}
        for name, tensor in f.tensors.items():
            if not tensor.elements and name not in used:  # whatever it is for, it changes nothing
                continue
            if name not in used and name not in known.by_context and name not in known.unused_tensors:
                raise GgufError(
                    f"[gguf] {f.where(name)}: tensor {name} has no place in the {f.arch} architecture; the result would be wrong"
                )
            if tensor.type not in quants.WEIGHT_TYPES:
                raise GgufError(
                    f"[gguf] {f.where(name)}: tensor {name} has type {tensor.type}, which has no kernel; "
                    f"types with one are {', '.join(quants.WEIGHT_TYPES)}"
                )
        _check_biases(known)
        return model

    def graph(
        self,
        n_tokens: int,
        n_ctx: int,
        *,
        head: Head,
        cache: CacheTypes = F16_CACHE,
        paging: Paging | None = None,
        kept: StateSlots = TWO_SLOTS,
        with_head: bool = False,
    ) -> Graph:
        """Raises GgufError naming a weight that is missing or misshaped; vkback/models/builder.py has inputs and names."""
        built = self.architecture.graph(n_tokens, n_ctx, head=head, cache=cache, paging=paging, kept=kept, with_head=with_head)
        if self.lora is None:
            return built
        columns = None if paging is None else (n_tokens, paging.n_slots)
        return replace(built, nodes=adapted(built.nodes, self.lora, columns))

    def head_graph(self, n_ctx: int, cache: CacheTypes = F16_CACHE) -> Graph:
        """Of the block or head that predicts the token after the next one (vkback/models/mtp.py, eagle3.py), for one token. Raises
        GgufError."""
        return self.architecture.head_graph(n_ctx, cache)

    def text_graph(self, n_tokens: int, n_ctx: int, texts: Texts, cache: CacheTypes = F16_CACHE) -> Graph:
        """Of whole texts, a vector for each. Raises GgufError."""
        built = self.architecture.text_graph(n_tokens, n_ctx, texts, cache)
        return built if self.lora is None else replace(built, nodes=adapted(built.nodes, self.lora))

    def whole_graphs(self) -> list[Graph]:
        """Graphs that read all that there is to read: the one that makes text, of those that make none and of files with more than it reads
        those of texts."""
        made = [self.graph(1, 1, head="all")] if self.architecture.causal else []
        return made + [self.text_graph(1, 1, texts) for texts in self.text_kinds()]

    def text_kinds(self) -> list[Texts]:
        """Uses of whole texts that together read all that such uses may; of a model that makes text none, unless it has weights for them
        alone."""
        known, hp = self.architecture, self.hp
        wide = not known.causal or any(hp.has_weight(f"{stem}.weight") for stem in DENSE)
        kinds: list[Pooling] = [*(("mean",) if wide else ()), *(("rank",) if ranks(hp) else ())]
        return [] if known.recurrent else [Texts(1, kind) for kind in kinds]

    @property
    def hp(self) -> HParams:
        return self.architecture.hp

    @property
    def recurrent_bytes(self) -> int:
        """Of one slot of all recurrent states."""
        states = (t for t in self.graph(1, 1, head="none").tensors().values() if t.kind == "state" and t.name.startswith("cache_ssm"))
        return sum(nbytes(t) // t.shape[0] for t in states)

    @property
    def default_n_ctx(self) -> int:
        """Rows of the KV cache unless somebody asks for others: the trained context, at most DEFAULT_N_CTX."""
        return min(self.hp.n_ctx_train, DEFAULT_N_CTX)

    def context(self, asked: int | None) -> int:
        """Rows of the KV cache as `LoadOptions.ctx` asks for them."""
        return self.default_n_ctx if asked is None else asked or self.hp.n_ctx_train

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of a file without vocabulary one that knows ids alone. Raises TokenizerError for a broken vocabulary, or one of another kind."""
        return Tokenizer.from_gguf(self.file) if self.has_text else Tokenizer.of_ids(self.file.path, self.hp.n_vocab)

    @property
    def has_text(self) -> bool:
        """Whether the file has a vocabulary; others know token ids only."""
        return self.file.get("tokenizer.ggml.model", str, NO_TEXT_VOCABULARY) != NO_TEXT_VOCABULARY

    @property
    def heading(self) -> str:
        """The description as titles have it, with the number of parameters where llama-bench says `?B`."""
        return model_heading(self.file)

    @property
    def description(self) -> str:
        """As llama-bench prints it: `llama 8B Q4_K - Medium`."""
        return model_description(self.file)

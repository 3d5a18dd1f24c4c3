"""What an architecture is, and those there are. docs/adding_an_architecture.md shows how one is added."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import RMS_EPS, Metadata, RopeMode
from vkback.graph import Graph, Tensor, live
from vkback.models import mtp
from vkback.models.blocks import rms_norm
from vkback.models.builder import F16_CACHE, TWO_SLOTS, CacheTypes, GraphBuilder, Head, Paging, StateSlots
from vkback.models.eagle3 import Eagle3Head
from vkback.models.keys import COMMON, MTP, POOLING, unread_keys
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, feed_forward_tensors
from vkback.models.texts import CLASSIFIER, Pooling, Texts, ranks, rows_of, stated_pooling
from vkback.units import UNKNOWN_SIZE


class Architecture(ABC):
    """One file's architecture: its hyperparameters, checked, and its graph.

    name       its `general.architecture`
    rope_mode  how RoPE pairs values
    norm_eps   the key of the norms' epsilon
    keys       metadata keys under its prefix that it reads, beside those that every architecture reads and the epsilon of its norms
    settled    keys that it does not read, with the only value it has for them
    required   keys under its prefix, integers, that must be there and be at least 1
    sizes      size class by number of layers, as llama-bench names it
    shapes     shapes that `vkback synth` can write, by name: published ones, and tiny ones, which tests compare with references
    vocabulary kind of the one that a synthetic model gets: "spm", or the pre-tokenizer of a byte-level BPE
    biases     linear layers of a block ("attn_q") that have a bias in every file
    by_context weights that a graph reads or not, depending on its n_ctx
    causal     a token sees those before it alone, and it makes text; else it makes vectors of texts, as a file of any architecture may say
    rank_function, rank_pooling  of the classifier's first matrix, and which vector it reads
    rank_softmax  whether scores are probabilities of the classifier's labels
    output_norm  stem of the norm behind the last layer, "" without one
    recurrent  it has states that hold all tokens so far and cannot be rewound, beside or instead of a KV cache
    attends    whether it has attention; else heads and RoPE of `hp` are of no meaning
    dense      whether a layer may have a feed-forward without experts; else a file need not say how wide one is
    varying    of the keys of `hp`, those that may differ from layer to layer: `hp` has the largest, `Metadata.of_layers` all

    unused_keys     of a file: those that have a value, but no part in the logits
    unused_tensors  of a file: those that the architecture knows and no graph reads

    causal   of a file: what it says
    mtp_block  of a file: the block that predicts the token after the next one (vkback/models/mtp.py); None: it has none
    head     beside a file: an EAGLE-3 head for it (vkback/models/eagle3.py), which then drafts in the place of `mtp_block`
    pooling  of a file: how it says that vectors of texts are made; None: nothing
    Hyperparameters beyond those of `hp` are attributes that __init__ reads from `self.metadata`.
    """

    name: ClassVar[str]
    rope_mode: ClassVar[RopeMode] = "normal"
    norm_eps: ClassVar[str] = RMS_EPS
    keys: ClassVar[frozenset[str]] = frozenset()
    settled: ClassVar[Mapping[str, int]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[Mapping[int, str]] = {}
    shapes: ClassVar[Mapping[str, ModelShape]] = {}
    vocabulary: ClassVar[str] = "llama-bpe"
    biases: ClassVar[tuple[str, ...]] = ()
    by_context: ClassVar[tuple[str, ...]] = ()
    causal: bool = True
    output_norm: ClassVar[str] = "output_norm"
    rank_function: ClassVar[str] = "TANH"
    rank_pooling: ClassVar[Pooling] = "cls"
    rank_softmax: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    attends: ClassVar[bool] = True
    dense: ClassVar[bool] = True
    varying: ClassVar[frozenset[str]] = frozenset()
    mtp_block: int | None = None
    head: Eagle3Head | None = None

    def __init__(self, f: GgufFile) -> None:
        """Raises GgufError naming the key that is missing, of another type, out of range or not known."""
        self.file = f
        self.metadata = Metadata(f, self.varying, self.keys)
        self.hp = self.metadata.hparams(self.rope_mode, self.norm_eps, attends=self.attends, dense=self.dense)
        for name in self.required:
            if self.metadata.count(name, 0, least=0) == 0:
                raise GgufError(f"[gguf] {f.path}: metadata key {self.metadata.key(name)} is 0 or missing, expected at least 1")
        causal = f.get(self.metadata.key("attention.causal"), bool, self.causal)
        if causal and not self.causal:
            raise self.metadata.fail("attention.causal", True, f"false: in {self.name} a token sees all of its text")
        if not causal and self.recurrent:
            raise self.metadata.fail("attention.causal", False, "true: states hold what comes before a token alone")
        self.causal = causal
        self.pooling = stated_pooling(f.metadata.get(self.metadata.key(POOLING)))
        makes_text = frozenset({"output.weight", "output.bias"})
        self.unused_tensors: frozenset[str] = frozenset() if causal else makes_text & f.tensors.keys()
        self.unused_keys = unread_keys(f, COMMON | self.keys | {self.norm_eps}, self.settled)

    def without_mtp_blocks(self, count: int) -> None:
        """Take the file's last `count` blocks, which predict tokens beyond the next one, out of the model; the first is `mtp_block`. Raises
        GgufError when there are no others."""
        n_layer = self.hp.n_layer - count
        if n_layer < 1:
            raise self.metadata.fail(MTP, count, f"less than the {self.hp.n_layer} blocks of the file")
        blocks = tuple(f"blk.{il}." for il in range(n_layer, self.hp.n_layer))
        self.unused_tensors |= {name for name in self.file.tensors if name.startswith(blocks)}
        self.hp = replace(self.hp, n_layer=n_layer)
        self.mtp_block = n_layer if mtp.first_tensor(n_layer) in self.file.tensors else None

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        """The file as graphs read it: tensors that hold several weights are cut into these (`GgufFile.cut`). Raises GgufError."""
        return f

    def embed(self, b: GraphBuilder) -> Tensor:
        """What goes into the first layer, F32 [n, n_embd]."""
        return b.embed()

    @abstractmethod
    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        """Layer `il` of x [n, n_embd], residuals included."""

    def normed(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Hidden rows [n, n_embd], which the output layer reads, of what the last layer gave."""
        return rms_norm(b, x, self.output_norm, "result_norm", plain="result_rms")

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Logits [n, n_vocab] of what the last layer gave."""
        return b.logits(self.normed(b, x))

    def classify(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Scores [texts, labels] of pooled vectors [texts, n_embd]: a matrix and its function, another matrix; either may be missing."""
        if rows := rows_of(self.hp, "cls"):
            x = b.linear(x, "cls", rows, "result_cls")
            x = b.graph.emit(self.rank_function, "result_cls_act", "F32", x.shape, (x,))
        if rows := rows_of(self.hp, "cls.output"):
            x = b.linear(x, "cls.output", rows, "result_rank")
        return x

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
        """The graph of n_tokens tokens at once, over caches of n_ctx rows, or in pages; vkback/models/builder.py has inputs and names.
        with_head: what `head` or `mtp_block` needs of them is kept.

        Raises GgufError naming a weight that is missing or misshaped, or saying that the model makes no text.
        """
        if not self.causal:
            raise GgufError(
                f"[model] {self.file.path}: {self.name} sees whole texts and makes none; expected a use of their vectors: vkback embed, "
                "model.embed(texts) or model.rank(query, documents) in Python, /v1/embeddings and /v1/rerank of vkback serve"
            )
        return self._graph(GraphBuilder(self.hp, n_tokens, n_ctx, head, cache, paging, kept=kept), with_head=with_head)

    def head_graph(self, n_ctx: int, cache: CacheTypes = F16_CACHE) -> Graph:
        """The graph of `head` or `mtp_block` for one token, over what a graph `with_head` has kept. Raises GgufError as `graph` does."""
        b = GraphBuilder(self.hp, 1, n_ctx, "all", cache)
        if self.head is not None:
            return self.head.graph(b)
        assert self.mtp_block is not None
        return mtp.block_graph(b, self.mtp_block, self.layer)

    def text_graph(self, n_tokens: int, n_ctx: int, texts: Texts, cache: CacheTypes = F16_CACHE) -> Graph:
        """The graph of whole texts of n_tokens tokens together, which gives a vector for each (vkback/models/texts.py). Raises GgufError
        where states hold one text alone, or there is no classifier to rank with."""
        if self.recurrent:
            raise GgufError(
                f"[model] {self.file.path}: recurrent states of {self.name} hold one text; expected a model of attention for vectors"
            )
        if texts.pooling == "rank" and not ranks(self.hp):
            names = " or ".join(CLASSIFIER)
            raise GgufError(f"[model] {self.file.path}: no classifier, so it cannot rank; expected tensors {names}: take a reranker")
        return self._graph(GraphBuilder(self.hp, n_tokens, n_ctx, "all", cache, texts=texts))

    def _graph(self, b: GraphBuilder, *, with_head: bool = False) -> Graph:
        embedded = x = self.embed(b)
        inputs = []
        for il in range(self.hp.n_layer):
            inputs.append(x)
            x = self.layer(b, x, il)
        if with_head and self.head is not None:
            logits = self.output(b, x)
            self.head.add_entries(b, [inputs[il] for il in self.head.layers])
            b.graph.nodes = live(b.graph.nodes, (logits,))  # of the head what it keeps alone
            return b.finish(logits)
        if with_head and self.mtp_block is not None:
            hidden = self.normed(b, x)
            logits = b.logits(hidden)
            mtp.add_entries(b, self.mtp_block, embedded, hidden, self.layer)
            b.graph.nodes = live(b.graph.nodes, (logits,))  # of the block what it keeps alone
            return b.finish(logits)
        y = self.output(b, x)
        return b.finish(self.classify(b, y) if b.texts and b.texts.pooling == "rank" else y)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        """The size as llama-bench names it ("8B"), of a file that need not be sound."""
        return cls.sizes.get(metadata.stated("block_count"), UNKNOWN_SIZE)

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        """The tensors of a synthetic model outside its layers, besides embedding, output and the norm before it."""
        if s.rope_stretch != 1.0 or s.rope_rotated:
            yield "rope_freqs.weight", (s.n_rot // 2,)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        """The tensors of layer `il` of a synthetic model, where layers differ."""
        return cls.layer_tensors(s)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        """The tensors of a layer of a synthetic model."""
        yield from attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from expert_tensors(s) if s.n_expert else feed_forward_tensors(s)


ARCHITECTURES: dict[str, type[Architecture]] = {}
"""Every architecture by its `general.architecture`; vkback/models/architectures fills it."""

A = TypeVar("A", bound=Architecture)


def register(cls: type[A]) -> type[A]:
    """Add an architecture. Raises ValueError when its name is taken."""
    if cls.name in ARCHITECTURES:
        raise ValueError(f"[models] two architectures are called {cls.name}")
    ARCHITECTURES[cls.name] = cls
    return cls

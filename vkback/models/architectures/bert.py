"""The `bert` architecture: BERT, MiniLM, BGE, E5, XLM-RoBERTa and rerankers of their shape. It makes vectors of texts.

The embedding of a token is a sum with the row of its position in a learned table and that of its segment (token type: of two texts the
second has another), layer-normed. Per layer: attention in which a token sees all of its text, gelu feed-forward without a gate, both
layer-normed with the residual stream. All linear layers have biases.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import LAYER_EPS, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import encoder_layer, feed_forward_plain, layer_norm, qkv_cuts
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, plain_feed_forward_tensors, with_biases
from vkback.units import UNKNOWN_SIZE

SEGMENTS = "segments"
"""Input I32 [n]: which of two texts that are read as one a token is of."""


class Encoder(Architecture):
    """What BERT and nomic-bert share: embedding, biases of norms, no norm behind the last layer."""

    vocabulary = "bert"
    norm_eps = LAYER_EPS
    causal = False
    output_norm = ""
    positions: ClassVar[bool]
    """Whether the position of a token is a row of a learned table."""

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        return f.cut(qkv_cuts(f, Metadata(f).hparams(cls.rope_mode, cls.norm_eps)))

    def embed(self, b: GraphBuilder) -> Tensor:
        hp = self.hp
        x = super().embed(b)
        if hp.has_weight("token_types.weight"):
            kinds = hp.weights["token_types.weight"].shape[0]
            table = hp.weight("token_types.weight", (kinds, hp.n_embd))
            ids = Tensor(SEGMENTS, "I32", (b.n,), "input")
            x = b.add(x, b.graph.emit("GET_ROWS", "type_embd", "F32", x.shape, (table, ids)), "inp_typed")
        if self.positions:
            if b.n_ctx > hp.n_ctx_train:
                raise GgufError(
                    f"[gguf] {hp.path}: a context of {b.n_ctx} tokens, but {self.name} has learned the positions of {hp.n_ctx_train}; "
                    f"ask for at most that many (--ctx {hp.n_ctx_train})"
                )
            table = hp.weight("position_embd.weight", (hp.n_ctx_train, hp.n_embd))
            x = b.add(x, b.graph.emit("GET_ROWS", "pos_embd", "F32", x.shape, (table, b.pos)), "inpL")
        return layer_norm(b, x, "token_embd_norm", "inp_norm", plain="inp_centered")

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(x)

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "token_embd_norm.weight", (s.n_embd,)
        yield "token_embd_norm.bias", (s.n_embd,)
        yield "token_types.weight", (2, s.n_embd)
        if cls.positions:
            yield "position_embd.weight", (s.n_ctx, s.n_embd)
        if s.metadata.get("pooling_type") == 4:
            yield from with_biases(iter([("cls.weight", (s.n_embd, s.n_embd)), ("cls.output.weight", (1, s.n_embd))]))

    @classmethod
    def norm_tensors(cls, s: ModelShape) -> Tensors:
        """Those of a layer."""
        for stem in ("attn_output_norm", "layer_output_norm"):
            yield f"{stem}.weight", (s.n_embd,)
            yield f"{stem}.bias", (s.n_embd,)


BY_CLS: dict[str, Any] = {"pooling_type": 2, "attention.causal": False}
BY_MEAN: dict[str, Any] = {"pooling_type": 1, "attention.causal": False}
RANKS: dict[str, Any] = {"pooling_type": 4, "attention.causal": False}


@register
class Bert(Encoder):
    name = "bert"
    positions = True
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    shapes: ClassVar = {
        "tiny-bert": ModelShape("bert", 3, 96, 160, 3, 3, 32, 331, 128, 10000.0, 1e-12, tied=True, metadata=BY_CLS),
        "tiny-bert-reranker": ModelShape("bert", 2, 64, 160, 4, 4, 16, 331, 128, 10000.0, 1e-12, tied=True, metadata=RANKS),
        "minilm-l6": ModelShape("bert", 6, 384, 1536, 12, 12, 32, 30522, 512, 10000.0, 1e-12, tied=True, metadata=BY_MEAN),
        "bge-m3": ModelShape("bert", 24, 1024, 4096, 16, 16, 64, 250002, 8192, 10000.0, tied=True, metadata=BY_CLS),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return encoder_layer(b, x, il, rope=None, feed=partial(feed_forward_plain, functions=("GELU_ERF",)))

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        n_layer = metadata.stated("block_count")
        if n_layer == 12:
            return "33M" if metadata.stated("embedding_length") == 384 else "109M"
        return {3: "17M", 6: "22M", 24: "335M"}.get(n_layer, UNKNOWN_SIZE)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        yield from with_biases(plain_feed_forward_tensors(s))
        yield from cls.norm_tensors(s)

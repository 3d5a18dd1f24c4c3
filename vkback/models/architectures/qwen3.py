"""The `qwen3` architecture: Qwen3 0.6B to 32B.

As llama, but RoPE pairs value i with value i + n_dims/2, and every head of Q and K is RMS-normed before it. Heads are 128 wide whatever
the embedding is. Rerankers have a classifier of two answers, yes and no, after the last token: the score is the first one's probability.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, qk_norm_tensors


@register
class Qwen3(Architecture):
    name = "qwen3"
    rope_mode = "neox"
    vocabulary = "qwen2"
    rank_pooling = "last"
    rank_softmax = True
    sizes: ClassVar = {40: "14B", 64: "32B"}
    shapes: ClassVar = {
        "qwen3-0.6b": ModelShape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1000000.0, 1e-6, tied=True),
        "tiny-qwen3": ModelShape("qwen3", 3, 96, 160, 4, 2, 40, 331, 128, 1000000.0, 1e-6, tied=True),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, qk_norm=rms_norm)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        layers, n_embd = metadata.stated("block_count"), metadata.stated("embedding_length")
        if layers == 28:
            return "0.6B" if n_embd == 1024 else "1.7B"
        if layers == 36:
            return "4B" if n_embd == 2560 else "8B"
        return super().size_class(metadata)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from qk_norm_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)

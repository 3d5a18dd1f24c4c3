"""The `qwen2` architecture: Qwen2 and Qwen2.5, and the DeepSeek-R1 distillations of them.

As llama, but RoPE pairs value i with value i + n_dims/2, and Q, K and V have biases.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, with_biases


@register
class Qwen2(Architecture):
    name = "qwen2"
    rope_mode = "neox"
    vocabulary = "qwen2"
    biases = ("attn_q", "attn_k", "attn_v")
    sizes: ClassVar = {32: "7B", 36: "3B", 48: "14B", 64: "32B", 80: "70B"}
    shapes: ClassVar = {
        "qwen2-7b": ModelShape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, 32768, 1000000.0, 1e-6),
        "qwen2-14b": ModelShape("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, 32768, 1000000.0, 1e-6),
        "tiny-qwen2": ModelShape("qwen2", 3, 96, 160, 6, 2, 16, 331, 128, 1000000.0, 1e-6, tied=True),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        layers, n_embd = metadata.stated("block_count"), metadata.stated("embedding_length")
        if layers == 24:
            return "0.5B" if n_embd == 1024 else "1B"
        if layers == 28:
            return "1.5B" if n_embd == 1536 else "7B"
        if layers == 40:
            return "4B" if metadata.stated("attention.head_count") == 20 else "13B"
        return super().size_class(metadata)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(attention_tensors(s), but="attn_output")
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)

"""The `seed_oss` architecture: ByteDance Seed-OSS 36B.

As qwen2, with heads as wide as `attention.key_length` says; the norm before the feed-forward is called post_attention_norm in a file.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, with_biases


@register
class SeedOss(Architecture):
    name = "seed_oss"
    rope_mode = "neox"
    biases = ("attn_q", "attn_k", "attn_v")
    sizes: ClassVar = {64: "36B"}
    shapes: ClassVar = {
        "seed-oss-36b": ModelShape("seed_oss", 64, 5120, 27648, 80, 8, 128, 155136, 524288, 10000000.0, 1e-6),
        "tiny-seed-oss": ModelShape("seed_oss", 3, 96, 160, 4, 2, 40, 331, 128, 10000000.0, 1e-6),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, second_norm="post_attention_norm")

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(attention_tensors(s), but="attn_output")
        yield "post_attention_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)

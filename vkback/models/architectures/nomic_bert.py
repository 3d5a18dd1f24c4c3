"""The `nomic-bert` architecture: Nomic Embed. It makes vectors of texts.

As bert, but RoPE, which pairs value i with value i + n_dims/2, takes the place of the table of positions, the feed-forward is SwiGLU, and
linear layers have no biases.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.bert import BY_MEAN, Encoder
from vkback.models.blocks import encoder_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors


@register
class NomicBert(Encoder):
    name = "nomic-bert"
    rope_mode = "neox"
    positions = False
    sizes: ClassVar = {12: "137M"}
    shapes: ClassVar = {
        "tiny-nomic-bert": ModelShape("nomic-bert", 3, 96, 160, 4, 4, 24, 331, 128, 1000.0, 1e-12, tied=True, metadata=BY_MEAN),
        "nomic-embed-text": ModelShape("nomic-bert", 12, 768, 3072, 12, 12, 64, 30522, 2048, 1000.0, 1e-12, tied=True, metadata=BY_MEAN),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return encoder_layer(b, x, il, rope=self.hp.rope)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from (t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        yield from feed_forward_tensors(s)
        yield from cls.norm_tensors(s)

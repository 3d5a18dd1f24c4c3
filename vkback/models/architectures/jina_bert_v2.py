"""The `jina-bert-v2` architecture: Jina Embeddings v2. It makes vectors of texts.

As bert, but ALiBi takes the place of the table of positions: of a score the distance of its two tokens is taken off, before and behind
alike, times a slope of the head. The feed-forward is GEGLU, with a bias of its last matrix alone. Q and K may be layer-normed, over all
heads at once. Attention is the general kernel's (vkback/ops/attention/general.py), with a mask that grows with the square of the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.bert import BY_MEAN, Encoder
from vkback.models.blocks import Glu, encoder_layer, feed_forward, layer_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, with_biases

MAX_BIAS = "attention.max_alibi_bias"
FEED = partial(feed_forward, glu=Glu("GEGLU_ERF"))


@register
class JinaBertV2(Encoder):
    name = "jina-bert-v2"
    positions = False
    keys = frozenset({MAX_BIAS})
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")
    sizes: ClassVar = {4: "33M", 12: "137M"}
    shapes: ClassVar = {
        "tiny-jina-bert-v2": ModelShape("jina-bert-v2", 3, 96, 160, 6, 6, 16, 331, 128, 10000.0, 1e-12, tied=True, metadata=BY_MEAN),
        "jina-v2-small": ModelShape("jina-bert-v2", 4, 512, 2048, 8, 8, 64, 30528, 8192, 10000.0, 1e-12, tied=True, metadata=BY_MEAN),
        "jina-v2-base": ModelShape("jina-bert-v2", 12, 768, 3072, 12, 12, 64, 30528, 8192, 10000.0, 1e-12, tied=True, metadata=BY_MEAN),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.max_bias = self.metadata.positive_or(MAX_BIAS, 8.0)
        self.qk_norm = layer_norm if self.hp.has_weight("blk.0.attn_q_norm.weight") else None

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return encoder_layer(b, x, il, rope=None, qk_norm=self.qk_norm, feed=FEED, max_bias=self.max_bias)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        for name, dims in feed_forward_tensors(s):
            yield name, dims
            if name == "ffn_down.weight":
                yield "ffn_down.bias", dims[:1]
        yield from cls.norm_tensors(s)

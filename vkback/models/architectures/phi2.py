"""The `phi2` architecture: Phi-1, 1.5 and 2.

Per layer: layer norm, then attention and a gelu feed-forward without a gate side by side, both added to the residual stream. RoPE pairs
value i with value i + n_dims/2 in a part of a head. All linear layers and norms have biases, the output too. Q, K and V may be one tensor
of a file.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import LAYER_EPS, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import feed_forward_plain, layer_norm, parallel_layer, qkv_cuts
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, plain_feed_forward_tensors, with_biases


@register
class Phi2(Architecture):
    name = "phi2"
    rope_mode = "neox"
    vocabulary = "phi-2"
    norm_eps = LAYER_EPS
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    sizes: ClassVar = {24: "1B", 32: "3B"}
    shapes: ClassVar = {
        "phi2-3b": ModelShape("phi2", 32, 2560, 10240, 32, 32, 80, 51200, 2048, 10000.0, rope_dims=32),
        "tiny-phi2": ModelShape("phi2", 3, 96, 160, 4, 4, 24, 331, 128, 10000.0, rope_dims=12),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        return f.cut(qkv_cuts(f, Metadata(f).hparams(cls.rope_mode, cls.norm_eps)))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return parallel_layer(b, x, il, rope=self.hp.rope, norm=layer_norm, feed=feed_forward_plain)

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        self.hp.weight("output.bias", (self.hp.n_vocab,))
        return b.logits(layer_norm(b, x, "output_norm", "result_norm", plain="result_centered"))

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "output.bias", (s.n_vocab,)
        yield "output_norm.bias", (s.n_embd,)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield "attn_norm.bias", (s.n_embd,)
        yield from with_biases(attention_tensors(s))
        yield from with_biases(plain_feed_forward_tensors(s))

"""The `starcoder2` architecture: StarCoder2 3B, 7B, 15B.

As gpt2, but with grouped K and V heads and, in place of learned positions, RoPE, which pairs value i with value i + n_dims/2.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.hparams import LAYER_EPS
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, feed_forward_plain, layer_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, plain_feed_forward_tensors, with_biases


@register
class StarCoder2(Architecture):
    name = "starcoder2"
    rope_mode = "neox"
    vocabulary = "starcoder"
    norm_eps = LAYER_EPS
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    sizes: ClassVar = {30: "3B", 32: "7B", 40: "15B", 52: "20B"}
    shapes: ClassVar = {
        "starcoder2-3b": ModelShape("starcoder2", 30, 3072, 12288, 24, 2, 128, 49152, 16384, 999999.44, tied=True),
        "tiny-starcoder2": ModelShape("starcoder2", 3, 96, 160, 4, 2, 40, 331, 128, 999999.44, tied=True),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        y = layer_norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_centered-{il}")
        x = b.last_token(b.add(attention(b, y, il, rope=self.hp.rope), x, f"ffn_inp-{il}"), il)
        y = layer_norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}", plain=f"ffn_centered-{il}")
        return b.add(feed_forward_plain(b, y, il), x, f"l_out-{il}")

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(layer_norm(b, x, "output_norm", "result_norm", plain="result_centered"))

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "output_norm.bias", (s.n_embd,)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield "attn_norm.bias", (s.n_embd,)
        yield from with_biases(attention_tensors(s))
        yield "ffn_norm.weight", (s.n_embd,)
        yield "ffn_norm.bias", (s.n_embd,)
        yield from with_biases(plain_feed_forward_tensors(s))

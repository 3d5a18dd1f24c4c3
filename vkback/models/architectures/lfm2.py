"""The `lfm2` architecture: Liquid AI's LFM2 and LFM2.5, 230M to 2.6B.

As llama, but RoPE pairs value i with value i + n_dims/2, every head of Q and K is RMS-normed, and a layer whose `attention.head_count_kv`
is 0 has a gated short convolution in the place of attention (vkback/models/short_conv.py). Attention sees a sliding window where the
file has one. The norm behind the last layer is stored as token_embd_norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, feed_forward, feed_forward_norm, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, qk_norm_tensors
from vkback.models.short_conv import TAPS, short_conv, short_conv_tensors
from vkback.units import UNKNOWN_SIZE

WINDOW = "attention.sliding_window"

SIZES = {2560: "230M", 4608: "350M", 6912: "700M", 8192: "1.2B", 10752: "2.6B"}
"""By the width of the feed-forward."""


@register
class Lfm2(Architecture):
    name = "lfm2"
    rope_mode = "neox"
    recurrent = True
    vocabulary = "lfm2"
    output_norm = "token_embd_norm"
    keys = frozenset({TAPS, WINDOW})
    required: ClassVar[tuple[str, ...]] = (TAPS,)
    varying = frozenset({"attention.head_count_kv"})
    shapes: ClassVar = {
        "lfm2-1.2b": ModelShape(
            "lfm2",
            16,
            2048,
            8192,
            32,
            8,
            64,
            65536,
            128000,
            1000000.0,
            tied=True,
            attention=frozenset({2, 5, 8, 10, 12, 14}),
            metadata={TAPS: 3},
        ),
        "lfm2-2.6b": ModelShape(
            "lfm2",
            30,
            2048,
            10752,
            32,
            8,
            64,
            65536,
            128000,
            1000000.0,
            tied=True,
            attention=frozenset({2, 5, 9, 13, 17, 21, 24, 27}),
            metadata={TAPS: 3},
        ),
        "tiny-lfm2": ModelShape(
            "lfm2", 4, 96, 160, 3, 1, 32, 333, 256, 10000.0, tied=True, attention=frozenset({1, 3}), metadata={TAPS: 3}
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.n_head_kv = self.metadata.of_layers("attention.head_count_kv", self.hp.n_layer)
        self.taps = self.metadata.count(TAPS, least=2)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        if self.n_head_kv[il]:
            heads = replace(self.hp.heads, n_kv=self.n_head_kv[il])
            mixed = attention(b, normed, il, rope=self.hp.rope, heads=heads, qk_norm=rms_norm, window=self.hp.window)
        else:
            mixed = short_conv(b, normed, il, self.taps)
        x = b.last_token(b.add(mixed, x, f"ffn_inp-{il}"), il)
        return b.add(self.feed(b, feed_forward_norm(b, x, il), il), x, f"l_out-{il}")

    def feed(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        """The feed-forward of layer `il` over its normed input [n, n_embd]."""
        return feed_forward(b, x, il)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return SIZES.get(metadata.stated("feed_forward_length"), UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        if s.attention is None or il in s.attention:
            yield from attention_tensors(s)
            yield from qk_norm_tensors(s)
        else:
            yield from short_conv_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from cls.feed_tensors(s, il)

    @classmethod
    def feed_tensors(cls, s: ModelShape, il: int) -> Tensors:
        """The feed-forward of layer `il` of a synthetic model."""
        yield from feed_forward_tensors(s)

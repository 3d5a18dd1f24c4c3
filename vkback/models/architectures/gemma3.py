"""The `gemma3` architecture: Gemma 3, text part.

As llama, but the embedding is multiplied by sqrt(n_embd), attention and feed-forward are normed once more before they are added
(post-norms), every head of Q and K is normed, and the gated unit is GEGLU. RoPE pairs value i with value i + n_dims/2. Of six layers five
see a sliding window alone and have a RoPE base of their own, without the scaling of the others. Norm weights are in a file as they are
multiplied by, with the 1 that the makers add.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import Glu, pre_post_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, qk_norm_tensors

PERIOD = 6
"""One layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""
LOCAL_BASE = 10000.0
"""RoPE base of the others, unless `rope.freq_base_swa` says otherwise."""
WIDE_HEADS = 62
"""Layers of the 27B, whose attention scale is of n_embd / n_head, which its heads are not wide."""


@register
class Gemma3(Architecture):
    name = "gemma3"
    rope_mode = "neox"
    vocabulary = "spm"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
    required = ("attention.sliding_window",)
    sizes: ClassVar = {18: "270M", 26: "1B", 32: "8B", 34: "4B", 48: "12B", 62: "27B"}
    shapes: ClassVar = {
        "tiny-gemma3": ModelShape(
            "gemma3",
            7,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            1000000.0,
            1e-6,
            tied=True,
            window=9,
            metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.scale": 0.25},
        ),
        "gemma3-1b": ModelShape("gemma3", 26, 1152, 6912, 4, 1, 256, 262144, 32768, 1000000.0, 1e-6, tied=True, window=512),
        "gemma3-4b": ModelShape(
            "gemma3",
            34,
            2560,
            10240,
            8,
            4,
            256,
            262208,
            131072,
            1000000.0,
            1e-6,
            tied=True,
            window=1024,
            metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp = self.hp
        if hp.n_layer == WIDE_HEADS:
            self.hp = hp = replace(hp, attn_scale=self.metadata.positive_or("attention.scale", math.sqrt(hp.n_head / hp.n_embd)))
        base = self.metadata.freq_base("rope.freq_base_swa", LOCAL_BASE)
        self.local_rope = replace(hp.rope, freq_base=base, scaling="none", freq_scale=1.0, ext_factor=0.0)
        self.sees_all = self.metadata.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)

    def embed(self, b: GraphBuilder) -> Tensor:
        x = super().embed(b)
        return b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=math.sqrt(self.hp.n_embd), bias=0.0)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope, window = (self.hp.rope, 0) if self.sees_all[il] else (self.local_rope, self.hp.window)
        return pre_post_norm_layer(b, x, il, rope=rope, qk_norm=rms_norm, window=window, glu=Glu("GEGLU"))

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from qk_norm_tensors(s)
        yield "post_attention_norm.weight", (s.n_embd,)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)
        yield "post_ffw_norm.weight", (s.n_embd,)

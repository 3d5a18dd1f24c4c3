"""The `gemma2` architecture: Gemma 2.

As gemma3, but heads of Q and K are not normed, every other layer sees a sliding window, RoPE is the same in all of them, and scores of
attention and logits have a softcap. Files made before its keys lack window and caps: these are the published ones then.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import LARGE
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import Glu, pre_post_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, post_norm_tensors

PERIOD = 2
"""One layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""
WINDOW, SCORE_CAP, LOGIT_CAP = 4096, 50.0, 30.0
"""Of files without keys."""
WIDE_HEADS = 46
"""Layers of the 27B, whose attention scale is of n_embd / n_head, which its heads are not wide."""


@register
class Gemma2(Architecture):
    name = "gemma2"
    rope_mode = "neox"
    vocabulary = "spm"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping"})
    sizes: ClassVar = {26: "2B", 42: "9B", 46: "27B"}
    shapes: ClassVar = {
        "gemma2-2b": ModelShape("gemma2", 26, 2304, 9216, 8, 4, 256, 256000, 8192, 10000.0, 1e-6, tied=True, window=4096),
        "gemma2-9b": ModelShape("gemma2", 42, 3584, 14336, 16, 8, 256, 256000, 8192, 10000.0, 1e-6, tied=True, window=4096),
        "gemma2-27b": ModelShape("gemma2", 46, 4608, 36864, 32, 16, 128, 256000, 8192, 10000.0, 1e-6, tied=True, window=4096),
        "tiny-gemma2": ModelShape(
            "gemma2",
            5,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            10000.0,
            1e-6,
            tied=True,
            window=9,
            metadata={"attention.scale": 0.25, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 12.0},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        hp = replace(hp, window=hp.window or WINDOW, softcap=hp.softcap or LOGIT_CAP)
        if hp.n_layer == WIDE_HEADS:
            hp = replace(hp, attn_scale=m.positive_or("attention.scale", math.sqrt(hp.n_head / hp.n_embd)))
        self.hp = hp
        self.softcap = m.positive_or("attn_logit_softcapping", SCORE_CAP, most=LARGE)
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)

    def embed(self, b: GraphBuilder) -> Tensor:
        x = super().embed(b)
        return b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=math.sqrt(self.hp.n_embd), bias=0.0)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        window = 0 if self.sees_all[il] else self.hp.window
        return pre_post_norm_layer(b, x, il, rope=self.hp.rope, window=window, softcap=self.softcap, glu=Glu("GEGLU"))

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)
        yield from post_norm_tensors(s)

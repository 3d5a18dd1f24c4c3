"""The `exaone4` architecture: EXAONE 4.0 1.2B and 32B.

As llama, but attention and feed-forward read the residual stream as it is and are normed before they are added to it, every head of Q and
K is RMS-normed, and RoPE pairs value i with value i + n_dims/2. With a sliding window, three layers of four have it, and the others rotate
neither Q nor K.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import post_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, post_norm_tensors, qk_norm_tensors

PERIOD = 4
"""With a window, one layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""


@register
class Exaone4(Architecture):
    name = "exaone4"
    rope_mode = "neox"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
    sizes: ClassVar = {30: "1.2B", 64: "32B"}
    shapes: ClassVar = {
        "exaone4-1.2b": ModelShape("exaone4", 30, 2048, 4096, 32, 8, 64, 102400, 65536, 1000000.0, tied=True, rope_stretch=16.0),
        "exaone4-32b": ModelShape("exaone4", 64, 5120, 27392, 40, 8, 128, 102400, 131072, 1000000.0, rope_stretch=16.0, window=4096),
        "tiny-exaone4": ModelShape("exaone4", 3, 96, 160, 3, 1, 32, 331, 128, 1000000.0, tied=True, rope_stretch=16.0),
        "tiny-exaone4-window": ModelShape("exaone4", 5, 96, 160, 4, 2, 40, 331, 128, 1000000.0, window=9),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)
        self.local_rope = replace(hp.rope, freq_base=m.freq_base("rope.freq_base_swa", hp.rope.freq_base))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        if not self.hp.window:
            return post_norm_layer(b, x, il, rope=self.hp.rope)
        rope, window = (None, 0) if self.sees_all[il] else (self.local_rope, self.hp.window)
        return post_norm_layer(b, x, il, rope=rope, window=window)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from (t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        yield from qk_norm_tensors(s)
        yield from post_norm_tensors(s)
        yield from feed_forward_tensors(s)

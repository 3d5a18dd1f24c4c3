"""The `olmo2` architecture: OLMo 2 and OLMo 3.

As llama, but attention and feed-forward read the residual stream as it is and are normed before they are added to it, Q and K are
RMS-normed over all their heads at once, and RoPE pairs value i with value i + n_dims/2. In OLMo 3 three layers of four see a sliding
window, and do not have the YaRN of the others, whose whole magnitude is `rope.scaling.attn_factor`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback import constants
from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import post_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, post_norm_tensors, whole_qk_norm_tensors

PERIOD = 4
"""With a window, one layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""


@register
class Olmo2(Architecture):
    name = "olmo2"
    rope_mode = "neox"
    vocabulary = "dbrx"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
    sizes: ClassVar = {16: "1B", 32: "7B", 40: "13B", 64: "32B"}
    shapes: ClassVar = {
        "olmo2-7b": ModelShape("olmo2", 32, 4096, 11008, 32, 32, 128, 100352, 4096, 500000.0, 1e-6),
        "olmo3-7b": ModelShape(
            "olmo2",
            32,
            4096,
            11008,
            32,
            32,
            128,
            100278,
            65536,
            500000.0,
            1e-6,
            window=4096,
            yarn=8.0,
            metadata={"rope.scaling.original_context_length": 8192, "rope.scaling.attn_factor": 1.2079442},
        ),
        "tiny-olmo2": ModelShape("olmo2", 3, 96, 160, 3, 1, 32, 331, 128, 500000.0, 1e-6),
        "tiny-olmo3": ModelShape(
            "olmo2",
            5,
            96,
            160,
            4,
            2,
            24,
            331,
            128,
            500000.0,
            1e-6,
            window=9,
            yarn=8.0,
            metadata={"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.3},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)
        base = m.freq_base("rope.freq_base_swa", hp.rope.freq_base)
        if hp.rope.scaling == "yarn" and hp.rope.attn_factor != 1.0:  # without it the magnitude is 1 + 0.1 ln(factor) by itself
            magnitude = 1.0 - 0.1 * float(constants.log(hp.rope.freq_scale))
            self.hp = replace(hp, rope=replace(hp.rope, attn_factor=hp.rope.attn_factor / magnitude))
        self.local_rope = replace(hp.rope, freq_base=base, scaling="none", freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        windowed = self.hp.window > 0 and not self.sees_all[il]
        rope, window = (self.local_rope, self.hp.window) if windowed else (self.hp.rope, 0)
        return post_norm_layer(b, x, il, rope=rope, qk_norm_of="all heads", window=window)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from (t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        yield from whole_qk_norm_tensors(s)
        yield from post_norm_tensors(s)
        yield from feed_forward_tensors(s)

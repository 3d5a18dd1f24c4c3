"""The `cohere2` architecture: Cohere Command R7B, Command A, Aya Vision.

As command-r without norms of Q and K. Of four layers three see a sliding window; the others rotate neither Q nor K.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.command_r import CommandR
from vkback.models.blocks import bare_layer_norm, parallel_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors

PERIOD = 4
"""One layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""


@register
class Cohere2(CommandR):
    name = "cohere2"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "logit_scale", "rope.freq_base_swa"})
    required = ("attention.sliding_window",)
    sizes: ClassVar = {32: "8B"}
    shapes: ClassVar = {
        "command-r7b": ModelShape(
            "cohere2", 32, 4096, 14336, 32, 8, 128, 256000, 132096, 50000.0, tied=True, window=4096, metadata={"logit_scale": 0.25}
        ),
        "tiny-cohere2": ModelShape("cohere2", 5, 96, 160, 4, 2, 40, 331, 128, 50000.0, tied=True, window=9, metadata={"logit_scale": 0.25}),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)
        self.local_rope = replace(hp.rope, freq_base=m.freq_base("rope.freq_base_swa", hp.rope.freq_base))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope, window = (None, 0) if self.sees_all[il] else (self.local_rope, self.hp.window)
        return parallel_layer(b, x, il, rope=rope, norm=bare_layer_norm, window=window)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from feed_forward_tensors(s)

"""The `smollm3` architecture: SmolLM3 3B.

As llama, but every fourth layer (the fourth, the eighth, ...) rotates neither Q nor K.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape

ROPE_PERIOD = 4
"""One layer of so many, the last of them, has no RoPE. No metadata key says it: all models of the architecture have this."""


@register
class SmolLm3(Architecture):
    name = "smollm3"
    sizes: ClassVar = {36: "3B"}
    shapes: ClassVar = {
        "smollm3-3b": ModelShape("smollm3", 36, 2048, 11008, 16, 4, 128, 128256, 65536, 5000000.0, 1e-6, tied=True),
        "tiny-smollm3": ModelShape("smollm3", 5, 96, 160, 3, 1, 32, 331, 128, 5000000.0, 1e-6, tied=True),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope = None if il % ROPE_PERIOD == ROPE_PERIOD - 1 else self.hp.rope
        return pre_norm_layer(b, x, il, rope=rope)

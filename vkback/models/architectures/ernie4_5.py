"""The `ernie4_5` architecture: ERNIE 4.5 0.3B.

As llama.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape


@register
class Ernie45(Architecture):
    name = "ernie4_5"
    vocabulary = "spm"
    sizes: ClassVar = {18: "0.3B"}
    shapes: ClassVar = {
        "ernie-4.5-0.3b": ModelShape("ernie4_5", 18, 1024, 3072, 16, 2, 128, 103424, 131072, 500000.0, tied=True),
        "tiny-ernie4-5": ModelShape("ernie4_5", 3, 96, 160, 4, 1, 40, 331, 128, 500000.0, tied=True),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope)

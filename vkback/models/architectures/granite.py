"""The `granite` architecture: IBM Granite 3 and the dense models of 4.

As llama, with four scales (vkback/models/scaled.py).
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.scaled import SCALES, Scaled
from vkback.models.shape import ModelShape

PUBLISHED = {"embedding_scale": 12.0, "residual_scale": 0.22}


@register
class Granite(Scaled):
    name = "granite"
    vocabulary = "refact"
    keys = SCALES | {"rope.scaling.finetuned"}
    sizes: ClassVar = {32: "3B", 40: "3B"}
    shapes: ClassVar = {
        "granite-3.3-2b": ModelShape(
            "granite",
            40,
            2048,
            8192,
            32,
            8,
            64,
            49159,
            131072,
            10000000.0,
            tied=True,
            metadata={**PUBLISHED, "attention.scale": 0.015625, "logit_scale": 8.0},
        ),
        "granite-3.3-8b": ModelShape(
            "granite",
            40,
            4096,
            12800,
            32,
            8,
            128,
            49159,
            131072,
            10000000.0,
            tied=True,
            metadata={**PUBLISHED, "attention.scale": 0.0078125, "logit_scale": 16.0},
        ),
        "tiny-granite": ModelShape(
            "granite",
            3,
            96,
            160,
            4,
            1,
            40,
            331,
            128,
            10000000.0,
            tied=True,
            metadata={"embedding_scale": 1.5, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 6.0},
        ),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.rope)

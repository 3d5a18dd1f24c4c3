"""The `mistral3` architecture: Ministral 3, Mistral Small 3.2, Devstral 2, text part.

As llama, with or without experts. With YaRN, `rope.scaling.yarn_log_multiplier` m divides RoPE's magnitude by 1 + 0.1 m ln(factor): with
the published 1 it is 1. Q grows with the position (vkback/models/temperature.py), by steps as long as the context before YaRN stretched it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from vkback import constants
from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Heads, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts, feed_forward, pre_norm_layer, separate_qkv
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape
from vkback.models.temperature import TEMPERATURE_LENGTH, TEMPERATURE_SCALE, TEMPERATURES, steps_of, tempered, with_temperatures

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

PUBLISHED: dict[str, Any] = {"rope.scaling.original_context_length": 16384, LOG_MULTIPLIER: 1.0, TEMPERATURE_SCALE: 0.1}
"""Of Ministral 3."""


@register
class Mistral3(Architecture):
    name = "mistral3"
    vocabulary = "tekken"
    keys = EXPERTS | {LOG_MULTIPLIER, TEMPERATURE_LENGTH, TEMPERATURE_SCALE}
    settled: ClassVar = {"expert_gating_func": 1}
    by_context = (TEMPERATURES,)
    sizes: ClassVar = {26: "3B", 34: "8B", 40: "14B"}
    shapes: ClassVar = {
        "ministral-3-3b": ModelShape(
            "mistral3", 26, 3072, 9216, 32, 8, 128, 131072, 262144, 1000000.0, tied=True, yarn=16.0, metadata=PUBLISHED
        ),
        "ministral-3-8b": ModelShape("mistral3", 34, 4096, 14336, 32, 8, 128, 131072, 262144, 1000000.0, yarn=16.0, metadata=PUBLISHED),
        "tiny-mistral3": ModelShape(
            "mistral3",
            3,
            96,
            160,
            4,
            1,
            40,
            331,
            128,
            1000000.0,
            yarn=16.0,
            metadata={"rope.scaling.original_context_length": 10, LOG_MULTIPLIER: 1.0, TEMPERATURE_SCALE: 0.3},
        ),
        "tiny-mistral3-moe": ModelShape(
            "mistral3", 3, 96, 160, 6, 2, 16, 331, 128, 1000000.0, tied=True, n_expert=5, n_expert_used=2, n_ff_expert=160
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        return with_temperatures(f, Metadata(f), steps_of(Metadata(f)))

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.temperature_length = steps_of(self.metadata)
        multiplier = self.metadata.positive_or(LOG_MULTIPLIER, 0.0, most=1e6)
        rope = self.hp.rope
        if rope.scaling == "yarn" and rope.freq_scale < 1.0 and multiplier:
            magnitude = 1.0 - 0.1 * multiplier * float(constants.log(rope.freq_scale))
            self.hp = replace(self.hp, rope=replace(rope, attn_factor=rope.attn_factor / magnitude))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, qkv=self.qkv, feed=experts if self.hp.n_expert else feed_forward)

    def qkv(self, b: GraphBuilder, x: Tensor, il: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """A Projection whose Q has its temperature before RoPE, which is linear."""
        q, k, v = separate_qkv(b, x, il, heads)
        return tempered(b, q, il, self.temperature_length), k, v

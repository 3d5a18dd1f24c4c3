"""The `qwen3vlmoe` architecture: Qwen3-VL 30B-A3B and 235B-A22B, text part.

As qwen3moe, with the RoPE of qwen3vl.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.models.architecture import register
from vkback.models.architectures.qwen3moe import Qwen3Moe
from vkback.models.keys import EXPERTS, SECTIONS
from vkback.models.shape import ModelShape


@register
class Qwen3VlMoe(Qwen3Moe):
    name = "qwen3vlmoe"
    keys = EXPERTS | {SECTIONS, "n_deepstack_layers"}
    shapes: ClassVar = {
        "qwen3vlmoe-30b-a3b": ModelShape(
            "qwen3vlmoe",
            48,
            2048,
            6144,
            32,
            4,
            128,
            151936,
            262144,
            5000000.0,
            1e-6,
            n_expert=128,
            n_expert_used=8,
            n_ff_expert=768,
            metadata={SECTIONS: (24, 20, 20, 0), "n_deepstack_layers": 3},
        ),
        "tiny-qwen3vlmoe": ModelShape(
            "qwen3vlmoe",
            3,
            96,
            224,
            4,
            2,
            40,
            331,
            128,
            5000000.0,
            1e-6,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            metadata={SECTIONS: (8, 6, 6, 0)},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.metadata.sections(SECTIONS, self.hp.rope.n_dims // 2)
        self.metadata.count("n_deepstack_layers", 0, least=0)

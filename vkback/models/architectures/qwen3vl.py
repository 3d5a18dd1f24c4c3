"""The `qwen3vl` architecture: Qwen3-VL 2B to 32B, text part.

As qwen3. RoPE has sections for time, height and width of a picture, whose frequencies are those of ordinary RoPE; a token of text has one
position in all three, so it is rotated as in qwen3. `n_deepstack_layers` is of pictures alone.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.models.architecture import register
from vkback.models.architectures.qwen3 import Qwen3
from vkback.models.keys import SECTIONS
from vkback.models.shape import ModelShape
from vkback.units import UNKNOWN_SIZE


@register
class Qwen3Vl(Qwen3):
    name = "qwen3vl"
    keys = frozenset({SECTIONS, "n_deepstack_layers"})
    sizes: ClassVar = {28: "1.7B", 64: "32B"}
    shapes: ClassVar = {
        "qwen3vl-4b": ModelShape(
            "qwen3vl",
            36,
            2560,
            9728,
            32,
            8,
            128,
            151936,
            262144,
            5000000.0,
            1e-6,
            tied=True,
            metadata={SECTIONS: (24, 20, 20, 0), "n_deepstack_layers": 3},
        ),
        "tiny-qwen3vl": ModelShape(
            "qwen3vl",
            3,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            5000000.0,
            1e-6,
            tied=True,
            metadata={SECTIONS: (8, 6, 6, 0), "n_deepstack_layers": 2},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.metadata.sections(SECTIONS, self.hp.rope.n_dims // 2)
        self.metadata.count("n_deepstack_layers", 0, least=0)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        layers = metadata.stated("block_count")
        return super().size_class(metadata) if layers == 36 else cls.sizes.get(layers, UNKNOWN_SIZE)
